"""List and watch of one kind of object in one namespace, with the official Kubernetes client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config, watch

from cluster.discovery.kubernetes_objects import version_of
from cluster.errors import SourceUnavailable, WatchExpired

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_PAGE = 250  # objects
_MAX_LIST_BYTES = 64 << 20  # of all pages
_ANSWER_S = 10.0  # until the API server answers, and for a page
_MAX_REASON = 300  # characters

_GONE = 410


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects are read."""

    kind: str  # "endpointslices" or "pods", as in a Role
    labels: str  # a selector
    namespace: str | None  # None: that of this process


class KubernetesApi:
    """A connection to the API server. Raises SourceUnavailable for all that fails there."""

    def __init__(self, api_client: client.ApiClient, selection: Selection, namespace: str) -> None:
        self._selection = selection
        self._namespace = namespace
        self._list: Callable[..., Awaitable[aiohttp.ClientResponse]] = (
            client.DiscoveryV1Api(api_client).list_namespaced_endpoint_slice_without_preload_content
            if selection.kind == "endpointslices"
            else client.CoreV1Api(api_client).list_namespaced_pod_without_preload_content
        )

    async def listed(self) -> tuple[list[dict[str, Any]], str]:
        """All objects, and the version from which a watch goes on."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        left = _MAX_LIST_BYTES
        while True:
            with _failures_of("list", self._selection, self._namespace):
                async with asyncio.timeout(_ANSWER_S), await self._ask(limit=_PAGE, _continue=cursor) as response:
                    page = bytearray()
                    async for chunk in response.content.iter_chunked(1 << 16):
                        page += chunk
                        if len(page) > left:
                            raise SourceUnavailable(
                                f"the list of {self._selection.kind} has over {_MAX_LIST_BYTES >> 20} MiB; select fewer"
                            )
                left -= len(page)
                answer = json.loads(page)
                if not isinstance(answer, dict) or not isinstance(answer.get("items", []), list | None):
                    raise SourceUnavailable(f"the API server sent no list of {self._selection.kind}")
            found += (each for each in answer.get("items") or () if isinstance(each, dict))
            metadata = answer.get("metadata")
            cursor = metadata.get("continue") if isinstance(metadata, dict) else None
            if not cursor:
                return found, version_of(answer)

    async def watch(
        self, version: str, duration_s: int, on_open: Callable[[], None]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Changes since a version, as (kind, object), until the API server ends it after `duration_s`.

        Raises WatchExpired if the version is too old. `on_open` is called when the API server has accepted it.
        """

        async def opened(_preload_content: bool = False, **options: Any) -> aiohttp.ClientResponse:
            async with asyncio.timeout(_ANSWER_S):
                response = await self._ask(**options)
            on_open()
            return response

        following = watch.Watch(return_type="object")
        stream = following.stream(
            opened,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=duration_s,
            _request_timeout=float(duration_s + _ANSWER_S),  # a connection that has died without a word ends, too
        )
        try:
            with _failures_of("watch", self._selection, self._namespace):
                async for event in stream:
                    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                        raise SourceUnavailable("the API server sent no event")
                    yield str(event["type"]), event["object"]
        finally:
            await following.close()

    async def _ask(self, **options: Any) -> aiohttp.ClientResponse:
        response = await self._list(
            self._namespace,
            label_selector=self._selection.labels,
            **{name: value for name, value in options.items() if value is not None},
        )
        if response.status == 200:
            return response
        try:
            status = json.loads(await response.content.read(1 << 16))
            message = str(status.get("message", "")) if isinstance(status, dict) else ""
        except ValueError:
            message = ""
        finally:
            response.close()
        raise client.ApiException(status=response.status, reason=message or response.reason)


def load_client() -> None:
    """Import the used parts of the client, which it would do on first use. Takes most of a second of processor time."""
    client.DiscoveryV1Api, client.CoreV1Api, client.ApiClient  # noqa: B018


@asynccontextmanager
async def connected(selection: Selection, kubeconfig: Path | None) -> AsyncIterator[KubernetesApi]:
    """A connection as `kubeconfig` describes it, else with the service account of this Pod."""
    configuration = client.Configuration()
    namespace = selection.namespace
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)
            namespace = namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
        else:
            await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
            _, active = config.list_kube_config_contexts(str(kubeconfig))
            namespace = namespace or active["context"].get("namespace", "default")
        api_client = client.ApiClient(configuration)
    except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        if kubeconfig is None:
            raise SourceUnavailable(
                f"this process has no service account of Kubernetes: {_short(error)} Run it in a Pod with "
                "automountServiceAccountToken, or name a file in discovery.kubeconfig"
            ) from error
        raise SourceUnavailable(f"discovery.kubeconfig: {kubeconfig} cannot be used: {_short(error)}") from error
    try:
        yield KubernetesApi(api_client, selection, namespace)
    finally:
        await api_client.close()


class _failures_of:
    """Turns failures of the client into SourceUnavailable, with the remedy where there is one."""

    def __init__(self, verb: str, selection: Selection, namespace: str) -> None:
        self._asked = f"{verb} {selection.kind} in namespace {namespace}"
        self._kind = selection.kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, client.ApiException):
            if error.status == _GONE:
                raise WatchExpired(f"the API server cannot {self._asked} from there: {_short(error.reason)}") from error
            raise SourceUnavailable(f"{self._asked}: {self._answer(error)}") from error
        if isinstance(error, TimeoutError):
            raise SourceUnavailable(f"{self._asked}: the API server does not answer") from error
        # The client raises KeyError and bare Exception for events that it cannot read.
        if isinstance(error, aiohttp.ClientError | OSError | ValueError | LookupError) or type(error) is Exception:
            raise SourceUnavailable(f"{self._asked}: {_short(error) or type(error).__name__}") from error

    def _answer(self, error: client.ApiException) -> str:
        answer = f"the API server answers {error.status}: {_short(error.reason)}"
        if error.status == 401:
            return (
                f"{answer}. Its token is not accepted; mount that of a service account, or renew discovery.kubeconfig"
            )
        if error.status == 403:
            group = ' (API group "discovery.k8s.io")' if self._kind == "endpointslices" else ""
            return f"{answer}. Give the service account the verbs list and watch on {self._kind}{group} by a Role"
        return answer


def _short(text: object) -> str:
    shown = "".join(each if each.isprintable() else " " for each in str(text or "")).strip()
    return shown if len(shown) <= _MAX_REASON else f"{shown[:_MAX_REASON]}…"
