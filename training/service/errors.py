"""Errors of the training service: answers to requests. Messages say what would be right."""


class ServiceError(Exception):
    status = 500


class Refused(ServiceError):
    """What was asked for cannot be done. Of a numbered command, its future fails instead."""

    status = 400


class KeyRefused(ServiceError):
    status = 401


class NotKnown(ServiceError):
    """There is no such session, model, path or future, or it is another tenant's."""

    status = 404


class Gone(ServiceError):
    """A finished session, or a sample that a restart has lost: the SDK samples again."""

    status = 410


class TooLarge(ServiceError):
    """A body, also when inflated."""

    status = 413


class Busy(ServiceError):
    """Too much is waiting: the SDK tries again, later."""

    status = 429
