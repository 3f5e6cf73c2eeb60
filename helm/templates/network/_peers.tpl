{{/* Ports of a pair's worker for the other one. A prefill agent sends warm-up requests to decode engines; decode engines
ask a prefill engine's bootstrap server for KV. */}}
{{- define "prelude.peerPorts" -}}
{{- $ports := index .values.ports .to -}}
- {port: {{ $ports.control }}, protocol: TCP}
- {port: {{ ternary $ports.bootstrap $ports.engine (eq .to "prefill") }}, protocol: TCP}
{{ include "prelude.kvPorts" . }}
{{- end -}}

{{/* The pods of a role, and the nodes of those of its pools that have hostNetwork. Takes root and role. */}}
{{- define "prelude.podsOf" -}}
- podSelector:
    matchLabels:
      {{- include "prelude.selector" (dict "root" .root "component" .role) | nindent 6 }}
{{- $onNodes := false }}
{{- range index (include "prelude.pools" .root | fromJson) .role }}{{- if .hostNetwork }}{{- $onNodes = true }}{{- end }}{{- end }}
{{- if $onNodes }}
{{- range .root.Values.networkPolicy.hostNetworkNodes }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Ports that engines choose. Takes values. */}}
{{- define "prelude.kvPorts" -}}
- {port: {{ .values.ports.kv.first }}, endPort: {{ .values.ports.kv.last }}, protocol: TCP}
{{- end -}}
