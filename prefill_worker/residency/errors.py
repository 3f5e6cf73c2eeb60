"""Errors of adapter residency.

    AdapterError
    ├── AdapterHolderBusy      503  at capacity; carries retry-after (cluster/errors.py)
    │   ├── LoadQueueFull      503  the load queue is full
    │   ├── HostMemoryFull     503  every adapter in host memory is in use, leased or pinned
    │   └── DiskCacheFull      503  every file in the disk cache is in use, or the disk is not writable
    ├── PinsExceedBudget       409  the memory-only adapters would exceed host memory
    ├── AdapterInUse           409  cannot be evicted: in use, leased, pinned or being loaded
    ├── AdapterNotReceived     422  pushed bytes do not match what was announced
    └── AdapterRefusedByEngine 422  the engine rejected the adapter

An adapter larger than a whole tier is an `AdapterTooLarge`. Every message names the value and the remedy.
"""

from adapters.errors import AdapterError
from cluster.errors import AdapterHolderBusy


class LoadQueueFull(AdapterHolderBusy):
    """The load queue is full."""

    code = "adapter_load_queue_full"


class HostMemoryFull(AdapterHolderBusy):
    """Nothing in host memory can be evicted now."""

    code = "adapter_host_memory_full"


class DiskCacheFull(AdapterHolderBusy):
    """Nothing in the disk cache can be evicted now, or the disk is not writable."""

    code = "adapter_disk_cache_full"


class PinsExceedBudget(AdapterError):
    """The memory-only revisions and this one would exceed host memory."""

    code = "adapter_pins_exceed_budget"
    http_status = 409


class AdapterInUse(AdapterError):
    """The revision cannot be evicted now."""

    code = "adapter_in_use"
    http_status = 409


class AdapterNotReceived(AdapterError):
    """The pushed bytes are not those announced."""

    code = "adapter_not_received"
    http_status = 422


class AdapterRefusedByEngine(AdapterError):
    """The engine rejected an adapter that passed this worker's checks. The message has the engine's reason."""

    code = "adapter_refused_by_engine"
    http_status = 422
