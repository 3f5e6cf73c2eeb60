{{/* Ports of a pair's worker for the other one. A prefill agent sends warm-up requests to decode engines; decode engines
ask a prefill engine's bootstrap server for KV. Takes root and to, its role. */}}
{{- define "prelude.peerPorts" -}}
{{- $ports := index .root.Values.ports .to -}}
{{- $switches := include "prelude.switches" (dict "root" .root "role" .to) -}}
- {port: {{ $ports.control }}, protocol: TCP}
{{- if or $switches (eq .to "prefill") }}
- {port: {{ $ports.bootstrap }}, protocol: TCP}
{{- end }}
{{- if or $switches (eq .to "decode") }}
- {port: {{ $ports.engine }}, protocol: TCP}
{{- end }}
- {port: {{ .root.Values.ports.kv.first }}, endPort: {{ .root.Values.ports.kv.last }}, protocol: TCP}  # engines choose
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
