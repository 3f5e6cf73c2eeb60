{{/* Ports of a pair's worker for the other one. A prefill agent sends warm-up requests to decode engines; decode engines
ask a prefill engine's bootstrap server for KV. */}}
{{- define "prelude.peerPorts" -}}
{{- $ports := index .values.ports .to -}}
- {port: {{ $ports.control }}, protocol: TCP}
- {port: {{ ternary $ports.bootstrap $ports.engine (eq .to "prefill") }}, protocol: TCP}
- {port: {{ .values.ports.kv.first }}, endPort: {{ .values.ports.kv.last }}, protocol: TCP}
{{- end -}}
