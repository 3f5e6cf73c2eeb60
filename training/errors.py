"""Errors of training.

TrainingError
├── DocumentInvalid     a document that nothing can be learned from, or that does not fit
└── AdapterUntrainable  an adapter that cannot be trained on this model, or that would not be served
"""

from __future__ import annotations


class TrainingError(Exception):
    """Something that the user can put right; the message says how."""


class DocumentInvalid(TrainingError):
    """A document without context or answer, or one that is longer than a row."""


class AdapterUntrainable(TrainingError):
    """An adapter that does not fit the model, or that workers would refuse."""
