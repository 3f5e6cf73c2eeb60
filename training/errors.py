"""Errors of training.

TrainingError
├── DocumentInvalid       a document that nothing can be learned from, or that does not fit
├── AdapterUntrainable    an adapter that cannot be trained on this model, or that would not be served
├── OptionInvalid         an option, or a combination of options, that cannot be trained with
├── DataInvalid           rows that cannot be trained on, each named by file and row
├── CheckpointMismatch    the run in the folder has another base model, other data or other options
├── CheckpointDamaged     a checkpoint that was changed or cut off after it was written
├── CheckpointNotWritten  the disk is full or refuses; the checkpoint before is as it was
├── LossNotFinite         a loss or a gradient is NaN or infinite; the last checkpoint is as it was
├── MemoryExceeded        the device has too little memory for the model or its rows; the last checkpoint is as it was
└── PushFailed            a cluster did not take the adapter

Every message names the offending value and what would be right.
"""

from collections.abc import Sequence

_SHOWN_FAULTS = 10


class TrainingError(Exception):
    """Something that the user can put right; the message says how."""


class DocumentInvalid(TrainingError):
    """A document without context or answer, or one that is longer than a row."""


class AdapterUntrainable(TrainingError):
    """An adapter that does not fit the model, or that workers would refuse."""


class OptionInvalid(TrainingError):
    """An option, or a combination of options, cannot be trained with."""


class DataInvalid(TrainingError):
    """Some rows cannot be trained on."""

    def __init__(self, faults: Sequence[str], num_rows: int) -> None:
        """`faults` begin with file and row."""
        self.faults = tuple(faults)
        shown = list(self.faults[:_SHOWN_FAULTS])
        if len(self.faults) > len(shown):
            shown.append(f"and {len(self.faults) - len(shown)} more")
        count = f"{len(self.faults)} of {num_rows} rows cannot be trained on"
        super().__init__("\n  ".join([f"{count}:", *shown]) if num_rows else "; ".join(shown))


class CheckpointMismatch(TrainingError):
    """The run in the folder was made with another base model, other data or other options."""


class CheckpointDamaged(TrainingError):
    """A checkpoint was changed or cut off after it was written."""


class CheckpointNotWritten(TrainingError):
    """The disk is full or refuses. The checkpoint before is as it was."""


class LossNotFinite(TrainingError):
    """A loss or a gradient is NaN or infinite. The last checkpoint is as it was."""


class MemoryExceeded(TrainingError):
    """The device has too little memory for the model or its rows. The last checkpoint is as it was."""


class PushFailed(TrainingError):
    """A cluster did not take the adapter."""


class FolderNotSeen(PushFailed):
    """The router cannot read the folder that it was told of. It takes uploads."""
