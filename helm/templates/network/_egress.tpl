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
