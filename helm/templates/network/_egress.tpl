{{/* A peer has selectors or a block, so both are two peers. */}}
{{- define "prelude.dnsEgress" -}}
{{- $dns := .Values.networkPolicy.dns -}}
- to:
    {{- with omit $dns "ipBlock" }}
    - {{ toJson . }}
    {{- end }}
    {{- with $dns.ipBlock }}
    - {ipBlock: {{ toJson . }}}
    {{- end }}
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}

{{- define "prelude.catalogEgress" -}}
{{- if .Values.catalog.existingSecret }}
- ports: [{port: {{ .Values.networkPolicy.catalog.port }}, protocol: TCP}]
  {{- with .Values.networkPolicy.catalog.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "prelude.storeEgress" -}}
{{- if hasPrefix "s3:" .Values.store.url }}
- ports: [{port: {{ default (include "prelude.storePort" .) .Values.networkPolicy.store.port }}, protocol: TCP}]
  {{- with .Values.networkPolicy.store.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of the URL at which the bucket is reached. */}}
{{- define "prelude.storePort" -}}
{{- $url := urlParse (default "https://s3.amazonaws.com" .Values.store.s3EndpointUrl) -}}
{{- default (ternary "80" "443" (eq $url.scheme "http")) (regexFind ":[0-9]+$" $url.host | trimPrefix ":") -}}
{{- end -}}
