{{- /* What a schema cannot say. Each is one line that says what to do. */ -}}
{{- define "fair.check" -}}
{{- $v := .Values -}}
{{- if and (include "fair.plans" .) (gt (int $v.router.count) 1) -}}
{{- fail (printf "router.count is %d, and placements deadline and qlm hold requests in one router alone: set router.count to 1" (int $v.router.count)) -}}
{{- end -}}
{{- if and $v.swap.models (gt (int $v.router.count) 1) -}}
{{- fail (printf "router.count is %d, and an agent reports to one router: with swap.models set router.count to 1" (int $v.router.count)) -}}
{{- end -}}
{{- if $v.swap.models -}}
{{- if not $v.modelVolume.existingClaim -}}
{{- fail "swap.models are folders below /models: set modelVolume.existingClaim to the claim that has them" -}}
{{- end -}}
{{- if include "fair.emulates" . -}}
{{- fail "swap.models cannot be emulated: a replica loads their weights" -}}
{{- end -}}
{{- if gt (int $v.replicas.nodes) 1 -}}
{{- fail "swap.models needs replicas of one node: set replicas.nodes to 1" -}}
{{- end -}}
{{- $names := list $v.model.name -}}
{{- range $v.swap.models -}}
{{- if has .name $names -}}{{- fail (printf "swap.models: %s is named twice" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- if not $v.insecure -}}
{{- $why := "or set insecure to true if another layer protects the cluster's network" -}}
{{- if not $v.curve.existingSecret -}}
{{- fail (printf "routers and KV events are reached from elsewhere: set curve.existingSecret to a secret of the keys that `sglang-fair keys` makes, %s" $why) -}}
{{- end -}}
{{- if not $v.gateway.tls.existingSecret -}}
{{- fail (printf "gateways are reached from elsewhere: set gateway.tls.existingSecret, %s" $why) -}}
{{- end -}}
{{- if not $v.router.tls.existingSecret -}}
{{- fail (printf "routers' pages are reached from elsewhere: set router.tls.existingSecret, %s" $why) -}}
{{- end -}}
{{- if and $v.dashboard.enabled (not $v.dashboard.tls.existingSecret) -}}
{{- fail (printf "the dashboard is reached from elsewhere: set dashboard.tls.existingSecret, %s" $why) -}}
{{- end -}}
{{- if not $v.replicas.tls.existingSecret -}}
{{- fail (printf "replicas are reached from elsewhere: set replicas.tls.existingSecret, %s" $why) -}}
{{- end -}}
{{- end -}}
{{- if and $v.replicas.tls.existingSecret (ne $v.replicas.discovery "names") -}}
{{- fail "replicas.tls: certificates have the pods' names, not their addresses: set replicas.discovery to names" -}}
{{- end -}}
{{- if and (or $v.replicas.tls.existingSecret $v.gateway.tls.existingSecret $v.router.tls.existingSecret) (not $v.ca.existingSecret) -}}
{{- fail "the authority of the certificates is unknown inside the cluster: set ca.existingSecret" -}}
{{- end -}}
{{- if and (gt (int $v.replicas.nodes) 1) $v.cache.size -}}
{{- fail "cache.size: replicas of several nodes have no claims of their own: set cache.existingClaim, or neither" -}}
{{- end -}}
{{- if and (gt (int $v.replicas.nodes) 1) (not (int $v.replicas.gpus)) -}}
{{- fail "replicas.nodes: a replica spans nodes with its GPUs: set replicas.gpus" -}}
{{- end -}}
{{- if and (include "fair.emulates" .) (int $v.replicas.gpus) -}}
{{- fail "an emulated replica has no GPU: set replicas.gpus to 0" -}}
{{- end -}}
{{- if and $v.cache.size $v.cache.existingClaim -}}
{{- fail "cache.size and cache.existingClaim: set one of them" -}}
{{- end -}}
{{- if and $v.gateway.autoscaling.enabled (gt (int $v.gateway.autoscaling.min) (int $v.gateway.autoscaling.max)) -}}
{{- fail "gateway.autoscaling: min is larger than max" -}}
{{- end -}}
{{- if and $v.picker.enabled $v.networkPolicy.enabled (not $v.picker.gateways) -}}
{{- fail "picker.gateways: say which pods are the gateway's, so that they reach pickers and replicas" -}}
{{- end -}}
{{- if and $v.gateway.ingress.enabled (not $v.gateway.ingress.host) -}}
{{- fail "gateway.ingress: set host" -}}
{{- end -}}
{{- end -}}

{{- /* Which of several models a replica has, where there are several; the agent says which. */ -}}
{{- define "fair.modelField" -}}
{{- if .Values.swap.models -}}
,model={{ .Values.model.name }}{{- range .Values.swap.models -}}|{{ .name }}{{- end -}}
{{- end -}}
{{- end -}}
