"""What the definitions of custom resources permit, as far as the chart uses them: other fields are refused.

The whole definitions are thousands of lines. On 2026-11-23 all that the chart renders was held against them, too, with
unknown fields refused: datreeio/CRDs-catalog 7b1e26e (cert-manager.io/v1, gateway.networking.k8s.io/v1,
keda.sh/v1alpha1, monitoring.coreos.com/v1), kubernetes-sigs/lws 060ab4d and
kubernetes-sigs/gateway-api-inference-extension 84436a9.
"""

from typing import Any

import jsonschema

# A type; the values that are permitted; a dictionary of fields, whose names end in "!" if they must be there; a list of
# one shape. `dict` is a map of anything, which its own schema checks.
Shape = Any

_SELECTOR = {"matchLabels": dict, "matchExpressions": [{"key!": str, "operator!": {"In", "NotIn"}, "values": [str]}]}
_SCALING = {
    "stabilizationWindowSeconds": int,
    "policies": [{"type!": {"Pods", "Percent"}, "value!": int, "periodSeconds!": int}],
}
SPECS: dict[tuple[str, str], Shape] = {
    ("cert-manager.io/v1", "Certificate"): {
        "secretName!": str,
        "duration": str,
        "dnsNames": [str],
        "usages": [{"server auth", "client auth", "digital signature", "key encipherment"}],
        "issuerRef!": {"name!": str, "kind": {"Issuer", "ClusterIssuer"}, "group": str},
    },
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "parentRefs": [{"name!": str, "namespace": str}],
        "hostnames": [str],
        "rules": [
            {
                "timeouts": {"request": str, "backendRequest": str},
                "backendRefs": [{"group": str, "kind": str, "name!": str, "port": int}],
            }
        ],
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"apiVersion": str, "kind": str, "name!": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": _SCALING, "scaleUp": _SCALING}}},
        "triggers!": [
            {"type!": {"prometheus"}, "metricType": {"Value", "AverageValue", "Utilization"}, "metadata!": dict}
        ],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector!": _SELECTOR,
        "podMetricsEndpoints": [
            {"port": str, "path": str, "interval": str, "relabelings": [{"targetLabel": str, "replacement": str}]}
        ],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [
            {
                "name!": str,
                "interval": str,
                "rules": [{"record": str, "alert": str, "expr!": str, "for": str, "labels": dict, "annotations": dict}],
            }
        ],
    },
}


def complaints(obj: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource's spec. Raises KeyError for a kind that is not here."""
    judge = jsonschema.Draft202012Validator(_schema(SPECS[obj["apiVersion"], obj["kind"]]))
    return [f"{each.json_path}: {each.message}" for each in judge.iter_errors(obj["spec"])]


def strictly_valid(obj: dict[str, Any], version: str) -> None:
    """Fails if this version of Kubernetes, or the definition of a custom resource, has no such field or value."""
    import kubernetes_validate

    if (obj["apiVersion"], obj["kind"]) in SPECS:
        found = complaints(obj)
        assert not found, found
        return
    kubernetes_validate.validate(obj, version, strict=True)


def _schema(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, set):
        return {"enum": sorted(shape)}
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0])}
    if isinstance(shape, dict):
        fields = {name.removesuffix("!"): _schema(inner) for name, inner in shape.items()}
        required = [name[:-1] for name in shape if name.endswith("!")]
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return {"type": {dict: "object", str: "string", int: "integer"}[shape]}
