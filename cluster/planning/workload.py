"""The workload: rates, lengths, adapters, and latency objectives."""

import math
from dataclasses import dataclass
from typing import Literal, Self

from adapters.model.base_model import ATTENTION_MODULES, MLP_MODULES, MODULES
from cluster.config.schema import AdapterLimits
from cluster.errors import ConfigError

MAX_RANK = 512  # of `adapter_limits.max_rank`
_NAMED_TARGETS = {"all": MODULES, "attention": ATTENTION_MODULES, "mlp": MLP_MODULES}
_KINDS = ("lora", "reft")


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """Some of the adapters: equal in kind, rank and targets."""

    kind: Literal["lora", "reft"]
    rank: int
    targets: tuple[str, ...] = MODULES  # of a LoRA; in a mixture of experts those of attention
    experts: bool = False  # a LoRA on all projections of all experts, too
    share: float = 1.0  # of the adapters, relative to the other kinds'

    @classmethod
    def parsed(cls, text: str) -> Self:
        """From KIND:RANK[:TARGETS][:SHARE], such as lora:16:q_proj+v_proj:0.3. Raises ConfigError."""
        parts = text.split(":")
        form = "expected KIND:RANK[:TARGETS][:SHARE], such as lora:16:attention:0.7 or reft:8"
        if len(parts) == 3 and parts[2][:1] in "-.0123456789" and parts[2]:
            parts.insert(2, "")
        if not 2 <= len(parts) <= 4:
            raise ConfigError(f"--adapter {text!r}: {form}")
        kind, rank = parts[:2]
        if kind not in _KINDS:
            raise ConfigError(f"--adapter {text!r}: its kind is {kind!r}; {form}")
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= 6 and 1 <= int(rank) <= MAX_RANK):
            raise ConfigError(f"--adapter {text!r}: its rank is {rank!r}; give a number from 1 to {MAX_RANK}")
        targets, experts = _targets(text, parts[2]) if len(parts) > 2 and parts[2] else (MODULES, False)
        try:
            share = float(parts[3]) if len(parts) > 3 else 1.0
        except ValueError:
            share = math.nan
        if not 0 < share < 1e6:
            raise ConfigError(f"--adapter {text!r}: its share is {parts[3]!r}; give a positive number, such as 0.3")
        return cls("lora" if kind == "lora" else "reft", int(rank), targets, experts and kind == "lora", share)


def _targets(text: str, names: str) -> tuple[tuple[str, ...], bool]:
    """The named projections, and whether experts are named."""
    given = [name for part in names.split("+") for name in _NAMED_TARGETS.get(part, (part,))]
    targets = tuple(dict.fromkeys(name for name in given if name != "experts"))
    if unknown := set(targets) - set(MODULES):
        raise ConfigError(
            f"--adapter {text!r}: no projection is called {', '.join(sorted(unknown))}; give "
            f"{', '.join(_NAMED_TARGETS)}, experts, or some of {'+'.join(MODULES)}"
        )
    return targets, "experts" in given


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, adapters and objectives. Lengths are means, in tokens."""

    requests_per_s: float  # at the busiest time
    prompt_tokens: int
    generated_tokens: int
    ttft_s: float  # objective: to the first token, for 95 % of the requests
    tpot_s: float  # objective: per further token, in the mean
    working_set: int  # adapters that are asked for again and again
    kinds: tuple[AdapterKind, ...] = (AdapterKind("lora", 16),)
    shared_prefix: float = 0.0  # of a prompt's tokens, the part that earlier prompts of its adapter began with, too
    length_cv: float = 0.8  # standard deviation of the prompts' length over its mean; lognormal with sigma 0.7: 0.8

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--requests-per-s", self.requests_per_s, 1e-6, 1e7),
            ("--prompt-tokens", self.prompt_tokens, 1, 1 << 24),
            ("--generated-tokens", self.generated_tokens, 1, 1 << 24),
            ("--ttft", self.ttft_s, 1e-4, 3600.0),
            ("--tpot", self.tpot_s, 1e-5, 3600.0),
            ("--working-set", self.working_set, 1, 10**9),
            ("--shared-prefix", self.shared_prefix, 0.0, 0.99),
            ("--length-cv", self.length_cv, 0.0, 100.0),
        ):
            if not least <= value <= most:  # False for NaN, too
                raise ConfigError(f"{option} is {value:g}; give a value from {least:g} to {most:g}")
        if not self.kinds:
            raise ConfigError("--adapter: give at least one kind, such as lora:16")

    @property
    def max_rank(self) -> int:
        return max(kind.rank for kind in self.kinds)

    @property
    def max_expert_rank(self) -> int:
        """Of LoRA on experts; 0: there is none."""
        return max((kind.rank for kind in self.kinds if kind.experts), default=0)

    @property
    def lora_share(self) -> float:
        """Of the adapters."""
        return sum(each.share for each in self.kinds if each.kind == "lora") / sum(each.share for each in self.kinds)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The projections that slots are for, in the model's order; the schema's where no adapter is a LoRA."""
        named = {module for kind in self.kinds if kind.kind == "lora" for module in kind.targets}
        return tuple(module for module in MODULES if module in named) or AdapterLimits().target_modules
