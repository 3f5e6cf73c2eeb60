"""Sessions and what belongs to them: models, checkpoints, sampling sessions. Everything is its tenant's only."""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from adapters.identity import full_name_of, split_adapter_name
from adapters.model.base_model import ATTENTION_MODULES, BaseModel
from adapters.model.normal_form import POSITIONS
from training.errors import AdapterUntrainable, OptionInvalid
from training.executor.executor import folder_of
from training.executor.operations import Export, Load, Save, Spec, Step
from training.service.checkpoints import SAMPLER_WEIGHTS, WEIGHTS, Checkpoints, expiry, facts_of, page
from training.service.commands import Commands, LiveModel
from training.service.errors import Busy, Gone, NotKnown, Refused
from training.service.identity import name_of
from training.service.journal import Checkpoint, Model, Pushed, R, Sampler, Session
from training.service.messages import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    SessionHeartbeat,
)
from training.service.publishing import Publisher
from training.trainable.spec import KINDS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OURS = "prelude."  # how keys of user_metadata begin that mean something here
_KEYS = ("adapter", "kind", "positions")
_SILENT_S = 3600.0  # after so long without a heartbeat a session has ended
_MAX_SEQ = 2**31 - 1
_SESSIONS, _SAMPLERS, _MODELS, _CHECKPOINTS = 256, 16_384, 16, 256  # of a tenant
_METADATA = 4096  # characters of a model's


Answer = dict[str, Any]  # as JSON


class Models:
    """Methods whose parameters are a tenant and a message return the answer. All raise ServiceError."""

    def __init__(
        self,
        commands: Commands,
        publisher: Publisher,
        checkpoints: Checkpoints,
        base: BaseModel,
        base_name: str,
        max_rank: int,
        to_sweep: asyncio.Event,
    ) -> None:
        """`base_name`: for clients. `to_sweep` is set when a sweep is due at once."""
        self._commands, self._journal = commands, commands.journal
        self._checkpoints, self._base, self._base_name, self._max_rank = checkpoints, base, base_name, max_rank
        self._seen_s = dict.fromkeys((each.id for each in self._journal.all(Session)), time.monotonic())
        self._publisher, self._to_sweep = publisher, to_sweep
        self._creating, self._sweeping = asyncio.Lock(), asyncio.Lock()

    # Sessions

    @property
    def sessions(self) -> Collection[str]:
        """Those that go on."""
        return self._seen_s.keys()

    async def create_session(self, tenant: str, _request: CreateSession) -> Answer:
        if self._journal.count(Session, tenant) >= _SESSIONS:
            raise Busy(f"{tenant} has {_SESSIONS} sessions, the limit; close some")
        session = Session(secrets.token_hex(8), tenant)
        await asyncio.to_thread(self._journal.put, session)
        self._seen_s[session.id] = time.monotonic()
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self, tenant: str, request: SessionHeartbeat) -> Answer:
        try:
            self._check_session(tenant, request.session_id)
        except NotKnown as error:
            raise Gone(str(error)) from None  # ends the SDK's loop
        self._seen_s[request.session_id] = time.monotonic()
        return {"type": "session_heartbeat"}

    async def finish_session(self, tenant: str, session: str) -> None:
        self._check_session(tenant, session)
        await self._finish(session)

    def _check_session(self, tenant: str, session: str) -> None:
        found = self._journal.get(Session, session)
        if found is None or found.tenant != tenant:
            raise NotKnown(f"there is no session {session[:80]!r}; it may have ended")

    async def _finish(self, session: str) -> None:
        await asyncio.to_thread(self._journal.remove_session, session)
        self._seen_s.pop(session, None)
        self._to_sweep.set()

    async def sweep(self, now_s: float) -> None:
        """End silent sessions; remove the models of ended ones, once what they were sent is done, and their aliases."""
        async with self._sweeping:
            self._to_sweep.clear()
            for session in [each for each, seen_s in self._seen_s.items() if now_s - seen_s >= _SILENT_S]:
                await self._finish(session)
            for model in [live.model for live in self._commands.models.values()]:
                is_over = model.session not in self._seen_s and self._commands.executor.is_idle(model.id)
                if is_over and self._publisher.end(model.id):
                    await self._commands.remove(model.id)
            await self._commands.fill_gaps(now_s)
            await self._checkpoints.delete_expired()
        await self._publisher.clear(self._seen_s)

    # Models

    async def create(self, tenant: str, request: CreateModel) -> Answer:
        lora, metadata = request.lora_config, request.user_metadata or {}
        self._check_base(request.base_model)
        if not 1 <= lora.rank <= self._max_rank:
            raise Refused(f"rank is {lora.rank}; it is from 1 to {self._max_rank}")
        if not (lora.train_attn or lora.train_mlp):
            raise Refused("train_attn and train_mlp are False, and train_unembed is not served: nothing is trained")
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        if not 0 <= seed < 2**63:
            raise Refused(f"seed is {seed}; it is from 0 to 2**63 - 1")
        positions = metadata.get(f"{_OURS}positions", "prefill")
        if positions not in POSITIONS:
            raise Refused(f"{_OURS}positions is {positions!r:.40}; it is {' or '.join(POSITIONS)}")
        kind = metadata.get(f"{_OURS}kind", "lora")
        if kind not in KINDS:
            raise Refused(f"{_OURS}kind is {kind!r:.40}; it is {' or '.join(KINDS)}")
        if kind != "lora" and not (lora.train_attn and lora.train_mlp):
            raise Refused(
                f"train_attn and train_mlp choose what LoRA changes; {_OURS}kind is {kind!r}: leave both True"
            )
        modules = self._modules(lora.train_attn, lora.train_mlp)
        spec = Spec(lora.rank, seed, modules, positions, _adapter(tenant, metadata), kind)
        try:
            adapter = spec.of_adapter()
            adapter.layers_of(self._base)
            adapter.modules_of(self._base)
        except AdapterUntrainable as error:
            raise Refused(str(error)) from None
        return await self._create(tenant, request.session_id, request.model_seq_id, spec, spec, metadata)

    def _check_base(self, name: str | None) -> None:
        if name != self._base_name:
            raise Refused(f"base_model is {name!r:.80}; {self._base_name!r} is served here")

    def _modules(self, attention: bool, mlp: bool) -> tuple[str, ...] | None:
        if attention and mlp:
            return None
        return tuple(each for each in self._base.slot_modules() if (each in ATTENTION_MODULES) == attention)

    async def _create(
        self, tenant: str, session: str, number: int, spec: Spec, first: Spec | Load, metadata: dict[str, str] | None
    ) -> Answer:
        if not 0 <= number <= _MAX_SEQ:
            raise Refused(f"model_seq_id is {number}; it counts from 0")
        model = Model(f"{session}:train:{number}", tenant, session, spec, metadata=_bounded(metadata))
        async with self._creating:
            self._check_session(tenant, session)
            if model.id not in self._commands.models:
                if model.id in self._commands.executor.tenants:  # the next one would take its snapshot for its own
                    raise Busy(f"{model.id} is being removed; try again, or choose another model_seq_id")
                count = sum(each.model.tenant == tenant for each in self._commands.models.values())
                if count >= _MODELS:
                    raise Refused(f"there are {count} models of {tenant}, the limit; close the clients of others")
                await self._commands.create(model, first)
        return {"request_id": f"{model.id}#0", "model_id": model.id}

    async def load(self, tenant: str, request: LoadWeights) -> Answer:
        """Into a new model, or into one that has just been created."""
        if request.session_id is not None and request.model_seq_id is not None and request.model_id is None:
            self._check_base(request.base_model or self._base_name)
            checkpoint, metadata = self._checkpoints.get(tenant, request.path, WEIGHTS), request.user_metadata or {}
            for name in ("kind", "positions"):
                has = getattr(checkpoint.spec, name)
                if (wants := metadata.get(f"{_OURS}{name}", has)) != has:
                    raise Refused(f"{_OURS}{name} is {wants!r:.40}, of the checkpoint {has!r}; leave it out")
            spec = replace(checkpoint.spec, adapter=_adapter(tenant, metadata))
            first = Load(checkpoint.id, checkpoint.folder, request.optimizer)
            return await self._create(
                tenant, request.session_id, request.model_seq_id, spec, first, request.user_metadata
            )
        if request.model_id is None or request.seq_id is None:
            raise Refused("load_weights has neither session_id and model_seq_id, nor model_id and seq_id")
        live = self._commands.model(tenant, request.model_id)

        def make() -> Load:
            checkpoint = self._checkpoints.get(tenant, request.path, WEIGHTS)
            for field in ("kind", "rank", "modules", "positions"):
                has, wants = getattr(checkpoint.spec, field), getattr(live.model.spec, field)
                if has != wants:
                    raise Refused(f"{field} of the checkpoint is {has}, of {live.model.id} {wants}")
            return Load(checkpoint.id, checkpoint.folder, request.optimizer)

        return {"request_id": await self._commands.accept(live, request.seq_id, make), "model_id": live.model.id}

    async def info(self, tenant: str, request: GetInfo) -> Answer:
        model, name = self._commands.model(tenant, request.model_id).model, self._base_name
        data = {"arch": self._base.architecture, "model_name": name, "tokenizer_id": name}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "model_name": name,
            **facts_of(model.spec),
        }

    def runs(self, tenant: str, limit: int, offset: int) -> Answer:
        """The tenant's models, oldest first."""
        own = [live.model for live in self._commands.models.values() if live.model.tenant == tenant]
        return page("training_runs", [self._run(each) for each in own], limit, offset)

    def run(self, tenant: str, run: str) -> Answer:
        """Also one that has ended, if it has checkpoints."""
        if (live := self._commands.models.get(run)) is None or live.model.tenant != tenant:
            return self._checkpoints.run(tenant, run)
        return self._run(live.model)

    def _run(self, model: Model) -> Answer:
        seen_s = time.time() - time.monotonic() + self._seen_s.get(model.session, 0.0)
        return self._checkpoints.run_of(model.id, model.tenant, model.spec, model.metadata, seen_s)

    # The operator

    async def described(self) -> list[Answer]:
        """All tenants' models, oldest first."""
        checkpoints = await asyncio.to_thread(self._journal.all, Checkpoint)
        saved = {each.id.split("/")[2]: each.id for each in checkpoints}  # the last of each
        return [
            {
                "model": live.model.id,
                "tenant": live.model.tenant,
                "kind": live.model.spec.kind,
                "rank": live.model.spec.rank,
                "positions": live.model.spec.positions,
                "adapter": live.model.spec.adapter,
                "state": self._commands.executor.state_of(live.model.id),
                "steps": live.steps,
                "tokens": live.tokens,
                "loss": live.loss,
                "checkpoint": saved.get(live.model.id),
            }
            for live in self._commands.models.values()
        ]

    async def stop(self, model: str) -> None:
        """Forget a model, also what waits for it. Its checkpoints stay. Raises NotKnown and Busy."""
        async with self._sweeping:
            if model not in self._commands.models:
                raise NotKnown(f"there is no model {model[:80]!r}; `prelude trainer list` shows them")
            if not self._publisher.end(model):
                raise Busy(f"weights of {model} are on their way to the router; stop it in a moment")
            await self._commands.remove(model)
        self._to_sweep.set()

    async def remove_tenants(self, is_removed: Callable[[str], bool]) -> None:
        """Forget all that these tenants have, with its files. Raises Busy while some is computed or pushed."""

        def own(kind: type[R]) -> list[R]:
            return [each for each in self._journal.all(kind) if is_removed(each.tenant)]

        for session in own(Session):
            await self._finish(session.id)
        async with self._creating:  # then none is created in these sessions any more
            models = [each for each, live in self._commands.models.items() if is_removed(live.model.tenant)]
        for model in models:
            with contextlib.suppress(NotKnown):  # the sweep was first
                await self.stop(model)
        if any(map(is_removed, self._commands.executor.tenants.values())):
            raise Busy("a command is being computed; try again in a moment")
        for checkpoint in own(Checkpoint):
            await self._checkpoints.delete(checkpoint)
        for record in (*own(Sampler), *own(Pushed)):  # of exports that ended late; the router has removed the aliases
            await asyncio.to_thread(self._journal.remove, record)
        await asyncio.to_thread(self._commands.delete_strays)

    # Checkpoints

    def save(self, live: LiveModel, request: SaveWeights) -> Save:
        path = self._new_path(live, WEIGHTS, request.path, overwrite=request.overwrite)
        folder = f"checkpoints/{folder_of(live.model.id)}/{request.path}"
        return Save(path, folder, expiry(request.ttl_seconds))

    def _new_path(self, live: LiveModel, kind: str, name: str, *, overwrite: bool = False) -> str:
        if _NAME.fullmatch(name) is None:
            raise Refused(f"the name {name[:80]!r} is none: 1 to 63 letters, digits, '.', '_' or '-', and no dot first")
        if name.startswith("sampler-"):
            raise Refused(f"the name {name!r} begins as those of sampling sessions do; choose another")
        path, tenant = f"tinker://{live.model.id}/{kind}/{name}", live.model.tenant
        exists = path in live.making.values() or self._journal.get(Checkpoint, path) is not None
        if exists and not overwrite:
            raise Refused(f"{path} exists; choose another name, or overwrite=True")
        count = self._journal.count(Checkpoint, tenant) + sum(
            len(each.making) for each in list(self._commands.models.values()) if each.model.tenant == tenant
        )
        if count >= _CHECKPOINTS and not exists:
            raise Refused(f"there are {_CHECKPOINTS} checkpoints, the limit; delete some")
        return path

    def step(self, live: LiveModel, request: OptimStep) -> Step:
        adam, spec = request.adam_params, live.model.spec
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(adam, name)) < 1:
                raise Refused(f"{name} is {value}; it is from 0 to below 1")
        for name in ("learning_rate", "eps", "weight_decay"):
            if not 0 <= (value := getattr(adam, name)) < 1e6:
                raise Refused(f"{name} is {value}; it is 0 or positive, and finite")
        try:
            spec.of_adapter().check_decay(adam.weight_decay)
        except OptionInvalid as error:
            raise Refused(str(error)) from None
        clip = min(max(adam.grad_clip_norm, 0.0), 1e30)  # as the SDK has it, 0 and less: not clipped
        return Step(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, clip)

    # Samplers

    def export(self, live: LiveModel, request: SaveWeightsForSampler) -> Export:
        if request.path is not None:
            path = self._new_path(live, SAMPLER_WEIGHTS, request.path)
            return Export(path, expires_s=expiry(request.ttl_seconds))
        if request.sampling_session_seq_id is None:
            raise Refused("neither path nor sampling_session_seq_id is given; name the weights")
        sampler = self._new_sampler(live.model.tenant, live.model.session, request.sampling_session_seq_id)
        if self._journal.get(Sampler, sampler) is not None:
            raise Refused(f"the sampling session {sampler} exists; choose another sampling_session_seq_id")
        return Export(sampler=sampler)

    def _new_sampler(self, tenant: str, session: str, number: int) -> str:
        if not 0 <= number <= _MAX_SEQ:
            raise Refused(f"sampling_session_seq_id is {number}; it counts from 0")
        if self._journal.count(Sampler, tenant) >= _SAMPLERS:
            raise Busy(f"{tenant} has {_SAMPLERS} sampling sessions, the limit; close clients")
        return f"{session}:sample:{number}"

    async def create_sampler(self, tenant: str, request: CreateSamplingSession) -> Answer:
        session, adapter, scores_prompts = request.session_id, None, True
        self._check_session(tenant, session)
        sampler = self._new_sampler(tenant, session, request.sampling_session_seq_id)
        if self._journal.get(Sampler, sampler) is None:  # else a retry: what it samples never changes
            if request.model_path is not None:
                checkpoint = self._checkpoints.get(tenant, request.model_path, SAMPLER_WEIGHTS)
                adapter, scores_prompts = checkpoint.adapter, checkpoint.scores_prompts
            else:
                self._check_base(request.base_model)
            made = Sampler(sampler, tenant, session, request.model_path, adapter, scores_prompts)
            await asyncio.to_thread(self._journal.put, made)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sampler(self, tenant: str, sampler: str) -> Sampler:
        found = self._journal.get(Sampler, sampler)
        if found is None or found.tenant != tenant:
            raise NotKnown(f"there is no sampling session {sampler[:80]!r}")
        return found


def _bounded(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Raises Refused."""
    length = sum(len(key) + len(value) for key, value in (metadata or {}).items())
    if length > _METADATA:
        raise Refused(f"user_metadata has {length} characters; {_METADATA} are kept")
    return metadata


def _adapter(tenant: str, metadata: dict[str, str]) -> str | None:
    """The adapter's name that a client chose. Raises Refused."""
    tenant = name_of(tenant)
    for key in metadata:
        if key.startswith(_OURS) and key.removeprefix(_OURS) not in _KEYS:
            raise Refused(f"user_metadata has {key[:40]!r}; behind {_OURS!r}, {', '.join(_KEYS)} mean something here")
    if (name := metadata.get(f"{_OURS}adapter")) is None:
        return None
    try:
        owner, short = split_adapter_name(name)
    except ValueError as error:
        raise Refused(f"{_OURS}adapter: {error}") from None
    if "/" in name and owner != tenant:
        raise Refused(f"{_OURS}adapter is {name!r}, of another tenant than {tenant!r}")
    return full_name_of(tenant, short)
