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
- ports: [{port: {{ .Values.networkPolicy.store.port }}, protocol: TCP}]
  {{- with .Values.networkPolicy.store.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "prelude.apiServerEgress" -}}
{{- if eq .Values.router.discovery "kubernetes" }}
- ports: [{port: 443, protocol: TCP}, {port: 6443, protocol: TCP}]  # of its Service, and behind it
  {{- with .Values.networkPolicy.apiServer.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
