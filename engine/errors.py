"""Errors of engines."""


class EngineError(Exception):
    """Base class: an SGLang engine or our hooks in it failed."""


class HookMismatch(EngineError):
    """A hook's target is missing, differs from the pinned source, or does not carry the hook after installation."""


class EngineRefused(EngineError):
    """The engine refused a control request."""


class AdapterNotTaken(EngineRefused):
    """The engine refused to load an adapter."""


class EngineUnreachable(EngineError):
    """The engine's HTTP server does not respond."""


class BaseModelNotRun(EngineError):
    """The pinned engine cannot serve this base model as its weights define it."""
