{{- define "accelerant.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "accelerant.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "accelerant.labels" -}}
{{ include "accelerant.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "accelerant.gpuResource" -}}
{{- if ne .Values.gpu.vendor "none" -}}
{{ .Values.gpu.resource | default (printf "%s.com/gpu" .Values.gpu.vendor) }}
{{- end -}}
{{- end -}}

{{- define "accelerant.image" -}}
{{- $variant := dict "nvidia" "cuda" "amd" "rocm" "none" "cpu" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion (get $variant .Values.gpu.vendor)) }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{- define "accelerant.secret" -}}
{{ .Values.secret.existing | default (include "accelerant.fullname" .) }}
{{- end -}}

{{- define "accelerant.scheme" -}}
{{ ternary "https" "http" (ne (.Values.settings.tls_certificate | default "") "") }}
{{- end -}}

{{- /* Combinations of values that the schema cannot refuse. */ -}}
{{- define "accelerant.check" -}}
{{- if and (or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled) (not .Values.postgresql) -}}
{{- fail "replicas above 1 and autoscaling need postgresql: true, since SQLite's job state belongs to one replica" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %v, above autoscaling.maxReplicas, which is %v" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and .Values.monitoring.enabled (not .Values.monitoring.keySecret.name) -}}
{{- fail "monitoring.enabled needs monitoring.keySecret: the name of a Secret with an API key of the scope monitor, without which /metrics answers 401. networkPolicy.from or monitoring.from must also admit Prometheus" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts, as [{host: gpu.example.org, paths: [{path: /, pathType: Prefix}]}]" -}}
{{- end -}}
{{- if not .Values.secret.existing -}}
{{- if not .Values.secret.keys -}}
{{- fail "set secret.existing, or secret.keys to the file of `accelerant keys create`: the service listens beyond its pod" -}}
{{- end -}}
{{- if and .Values.postgresql (not .Values.secret.stateUrl) -}}
{{- fail "postgresql: true needs secret.stateUrl, or the key state_url in secret.existing" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A setting's value as TOML. Helm reads whole numbers as floating-point ones. */ -}}
{{- define "accelerant.toml" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ toJson . }}{{ end -}}
{{- else if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $name, $value := . }}{{ $pairs = append $pairs (printf "%s = %s" $name (toJson $value)) }}{{ end -}}
{{ printf "{ %s }" (join ", " $pairs) }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}
