"""What can go wrong with an engine."""


class EngineError(Exception):
    """Any failure of an SGLang engine or of our place in it."""


class HookMismatch(EngineError):
    """A hook's target is missing, is not the pinned source, or did not take the hook."""


class EngineRefused(EngineError):
    """The engine answered a control request with a refusal."""


class AdapterNotTaken(EngineRefused):
    """The engine has looked at an adapter and does not take it."""


class EngineUnreachable(EngineError):
    """The engine's HTTP server does not answer."""


class BaseModelNotRun(EngineError):
    """The pinned engine does not run this base model as it is."""
