{{- define "prelude.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 28 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Which pods: takes root, component, and for pools role and pool. */}}
{{- define "prelude.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
prelude.pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "prelude.labels" -}}
{{ include "prelude.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: prelude
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "prelude.image" -}}
{{- $image := index .root.Values.image .kind -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* The pools of all roles that are enabled, with defaults, as JSON: {role: {pool: settings}}. */}}
{{- define "prelude.pools" -}}
{{- $found := dict -}}
{{- range $role := list "prefill" "decode" "unified" -}}
{{- $pools := dict -}}
{{- range $name, $own := index $.Values.pools $role -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy (default dict $own)) -}}
{{- if $pool.enabled -}}
{{- $_ := set $pool "kind" (default (ternary "Deployment" "StatefulSet" (eq $role "decode")) $pool.kind) -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- if $pools -}}{{- $_ := set $found $role $pools -}}{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* "true" if workers of the role become those of the other role of a pair. Takes root and role. */}}
{{- define "prelude.switches" -}}
{{- if and (ne .role "unified") (has .root.Values.cluster.role_changes (list "manual" "auto")) }}true{{ end -}}
{{- end -}}

{{/* "true" if workers of the role load adapters, if only after a change of role. Takes root and role. */}}
{{- define "prelude.holdsAdapters" -}}
{{- if or (ne .role "decode") (include "prelude.switches" .) }}true{{ end -}}
{{- end -}}

{{/* The ports that workers of a role open, as JSON. Takes root and role. */}}
{{- define "prelude.workerPorts" -}}
{{- $ports := index .root.Values.ports .role -}}
{{- ternary $ports (omit $ports "bootstrap") (eq (include "prelude.holdsAdapters" .) "true") | toJson -}}
{{- end -}}

{{/* The names that a map has as NAME: true, as JSON. */}}
{{- define "prelude.chosen" -}}
{{- $names := list -}}
{{- range $name, $isChosen := . -}}{{- if $isChosen -}}{{- $names = append $names $name -}}{{- end -}}{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{- define "prelude.poolName" -}}
{{ include "prelude.fullname" .root }}-{{ .role }}-{{ .pool }}
{{- end -}}
