"""Errors of the training service.

ServiceError
├── Refused           400  what was asked for cannot be done; of a numbered command, its future fails instead
├── KeyRefused        401  no key, or an unknown one
├── ScopeMissing      403  the key permits something else
├── NotKnown          404  no such session, model, path or future, or it is another tenant's
├── Gone              410  a finished session; a sample that a restart has lost
├── TooLarge          413  a body, also when inflated
└── Busy              429  too much is waiting; the SDK tries again, later
"""

from __future__ import annotations


class ServiceError(Exception):
    """An answer to a request. The message says what would be right."""

    status = 500


class Refused(ServiceError):
    """What was asked for cannot be done."""

    status = 400


class KeyRefused(ServiceError):
    """No key, or an unknown one."""

    status = 401


class ScopeMissing(ServiceError):
    """The key permits something else."""

    status = 403


class NotKnown(ServiceError):
    """There is no such thing, or it is another tenant's."""

    status = 404


class Gone(ServiceError):
    """It was there before."""

    status = 410


class TooLarge(ServiceError):
    """A body is over its limit, also when inflated."""

    status = 413


class Busy(ServiceError):
    """Too much is waiting."""

    status = 429
