"""What keeps an adapter from being unloaded, with the calls that SGLang's server and scheduler make."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from engine.hooks import uses

NAME = "sha256:a"
IN_USE = f"adapter {NAME} is in use by 1 requests"


class Manager:
    """The parts of SGLang's TokenizerManager that the hooks use."""

    def __init__(self, **adapters_of_requests: str | list[str | None] | None) -> None:
        """The adapters of requests by their ids; none has been sent to the scheduler yet."""
        self.rid_to_state = {
            rid: SimpleNamespace(obj=SimpleNamespace(lora_path=adapter), dispatched=False, lora_released=False)
            for rid, adapter in adapters_of_requests.items()
        }
        self.lora_registry = SimpleNamespace(_registry={NAME: "its record"}, _counters={NAME: "SGLang's count"})
        self.lora_ref_cache = {NAME: "its record"}
        self.pending_lora_unloads: dict[str, str] = {}
        self.scheduler_says = SimpleNamespace(success=True)

    async def update_lora_adapter_communicator(self, obj):
        assert obj.lora_id == NAME
        assert NAME not in self.lora_registry._registry  # nobody finds it any more
        assert NAME not in self.lora_ref_cache  # else a late request would load it again
        return [self.scheduler_says]

    def unload(self):
        return asyncio.run(uses.unload_only_what_is_idle(None, self, SimpleNamespace(lora_name=NAME)))

    @property
    def has_it(self) -> list[bool]:
        return [NAME in each for each in (self.lora_registry._registry, self.lora_ref_cache)]


@pytest.mark.parametrize("adapter", [NAME, [NAME, None]])
def test_one_of_a_request_on_its_way_to_the_scheduler_is_in_use(adapter):
    """Also while it is being looked up, which SGLang does not count."""
    manager = Manager(one=adapter, other=None)
    with pytest.raises(ValueError, match=IN_USE):
        manager.unload()
    assert manager.has_it == [True, True]
    manager.rid_to_state["one"].dispatched = True
    assert manager.unload().success  # the scheduler did not need it
    assert manager.has_it == [False, False]
    assert not manager.lora_registry._counters


def test_requests_that_go_on_without_it_do_not_count_it_down():
    """Loaded again meanwhile, it has another count."""
    manager = Manager(one=NAME, other="sha256:b")
    for state in manager.rid_to_state.values():
        state.dispatched = True
    manager.unload()
    assert [state.lora_released for state in manager.rid_to_state.values()] == [True, False]


def test_one_that_the_scheduler_needs_stays():
    manager = Manager(one=NAME)
    manager.rid_to_state["one"].dispatched = True
    manager.scheduler_says = SimpleNamespace(success=False, error_message=IN_USE)
    assert manager.unload().error_message == IN_USE
    assert manager.has_it == [True, True]
    assert manager.lora_registry._counters == {NAME: "SGLang's count"}
    assert not manager.rid_to_state["one"].lora_released


def test_one_that_is_missing_has_a_status_of_its_own_and_is_not_given_back():
    async def fail(*_):
        raise ValueError("Got LoRA adapter that has never been loaded: sha256:a")

    asked = SimpleNamespace(lora_path=NAME)
    with pytest.raises(HTTPException) as missing:
        asyncio.run(uses.note_lookup(fail, Manager(), asked))
    assert (missing.value.status_code, asked.lora_path) == (uses.NOT_RESIDENT_STATUS, None)


def test_one_that_only_some_ranks_have_can_be_unloaded():
    """SGLang takes no load of it before."""
    manager = Manager()
    manager.lora_registry._registry.clear()
    manager.pending_lora_unloads[NAME] = NAME
    assert manager.unload().success
    assert manager.pending_lora_unloads == {}


# ---- the scheduler --------------------------------------------------------------------------------------------------


def request(adapter: str | None = NAME, *, is_finished: bool = False, **fields):
    return SimpleNamespace(lora_id=adapter, finished=lambda: is_finished, **fields)


def batch(*reqs, is_extend: bool = True):
    return SimpleNamespace(reqs=list(reqs), forward_mode=SimpleNamespace(is_extend=lambda: is_extend))


class Scheduler:
    """The parts of SGLang's Scheduler that tell who needs an adapter, and the LoRA manager of its rank."""

    def __init__(self, mode: str = "null", settings: dict | None = None, **queues) -> None:
        self.waiting_queue = queues.get("waiting", [])
        self.grammar_manager = SimpleNamespace(grammar_queue=queues.get("grammar", []))
        self.chunked_req = queues.get("chunked")
        self.last_batch = queues.get("last")
        self.running_batch = batch(*queues.get("running", []))
        self.disaggregation_mode = SimpleNamespace(value=mode)
        if mode == "prefill":
            self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=queues.get("bootstrap", []))
            self.disagg_prefill_inflight_queue = queues.get("inflight", [])
        self.unloaded: list[str] = []
        config = SimpleNamespace(hf_config={"prelude": settings or {}})
        manager = SimpleNamespace(
            configs={NAME: config},
            loras={NAME: "its mapping"},
            memory_pool=SimpleNamespace(prelude_packed=SimpleNamespace(unload=self.unloaded.append)),
            create_lora_update_result=lambda success, why="": SimpleNamespace(success=success, error_message=why),
            _unload_lora_adapter=lambda _: SimpleNamespace(success=True),
        )
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))

    def unload(self) -> str:
        """Why it is refused; empty if it is unloaded."""
        obj = SimpleNamespace(to_ref=lambda: SimpleNamespace(lora_id=NAME))
        result = uses.unload_unless_needed(None, self, obj)
        assert result.success == bool(self.unloaded)
        return "" if result.success else result.error_message


RETRACTED = SimpleNamespace(lora_id=None, prelude_adapter=NAME)
FOR_LONG = [{"positions": "all"}, {"memory_only": True}]


@pytest.mark.parametrize(
    "needed",
    [
        {"waiting": [request()]},
        {"waiting": [RETRACTED]},
        {"grammar": [request()]},
        {"chunked": request()},
        {"last": batch(request())},
        {"mode": "prefill", "bootstrap": [request()]},
        {"mode": "prefill", "inflight": [request(is_finished=True)]},
        *({"running": [request()], "settings": settings} for settings in FOR_LONG),
    ],
)
def test_needed_by_a_request_whose_prompt_is_not_read_or_whose_answer_needs_it(needed):
    assert Scheduler(**needed).unload() == IN_USE


@pytest.mark.parametrize(
    "idle",
    [
        {"running": [request()]},
        {"running": [SimpleNamespace(lora_id=None, prelude_adapter=NAME)]},
        {"last": batch(request(), is_extend=False)},
        {"waiting": [request("sha256:b")], "grammar": [request(None)], "last": batch(request("sha256:b"))},
        *({"running": [request(is_finished=True)], "settings": settings} for settings in FOR_LONG),
    ],
)
def test_an_answer_that_began_with_it_needs_it_no_more(idle):
    assert Scheduler(**idle).unload() == ""


def test_a_chunked_prompt_counts_once():
    one = request()
    assert Scheduler(chunked=one, last=batch(one)).unload() == IN_USE
