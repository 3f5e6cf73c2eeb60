"""What can keep a worker from taking an adapter in.

    AdapterError
    ├── AdapterHolderBusy      503  no room or no hands now; says when to try again (cluster/errors.py)
    │   ├── LoadQueueFull      503  too many loads wait
    │   ├── HostMemoryFull     503  host memory is full of adapters that are in use, leased or pinned
    │   └── DiskCacheFull      503  the same of the disk
    ├── PinsExceedBudget       409  the pinned adapters would not fit in host memory
    ├── AdapterInUse           409  it cannot be evicted: it is used, leased, pinned or being loaded
    ├── AdapterNotReceived     422  what was sent of it is not what was announced, or cannot be kept
    └── AdapterRefusedByEngine 422  the engine has looked at it and does not take it

An adapter that is larger than a whole tier is an `AdapterTooLarge`. Every message names the value and the remedy.
"""

from __future__ import annotations

from adapters.errors import AdapterError
from cluster.errors import AdapterHolderBusy


class LoadQueueFull(AdapterHolderBusy):
    """As many loads wait as may."""

    code = "adapter_load_queue_full"


class HostMemoryFull(AdapterHolderBusy):
    """Nothing in host memory can be evicted now."""

    code = "adapter_host_memory_full"


class DiskCacheFull(AdapterHolderBusy):
    """There is no room on the worker's disk and nothing there can be evicted now, or it cannot be written at all."""

    code = "adapter_disk_cache_full"


class PinsExceedBudget(AdapterError):
    """The revision cannot be pinned beside those that are."""

    code = "adapter_pins_exceed_budget"
    http_status = 409


class AdapterInUse(AdapterError):
    """The revision cannot be evicted now."""

    code = "adapter_in_use"
    http_status = 409


class AdapterNotReceived(AdapterError):
    """The bytes that a router sent are not those that it announced, or there is no room for them after all."""

    code = "adapter_not_received"
    http_status = 422


class AdapterRefusedByEngine(AdapterError):
    """The engine does not take an adapter that this worker found right. The message has the engine's reason."""

    code = "adapter_refused_by_engine"
    http_status = 422
