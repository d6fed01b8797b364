"""Every error Edda raises, in one tree.

EddaError
├── WorkflowError                   what a workflow's author or caller meets
│   ├── TerminalError                   raised by users: never retry this
│   ├── RetryExhaustedError             an activity failed on its last attempt
│   ├── ActivityTimeoutError            an attempt took too long           (a TimeoutError)
│   │   └── HeartbeatTimeoutError           it gave no sign of life
│   ├── ActivityCancelledError          an attempt was cancelled by its own code
│   ├── WorkflowCancelledError          the run was cancelled
│   ├── WorkflowTimeoutError            the run passed its deadline        (a TimeoutError)
│   ├── EventTimeoutError               no event came in time              (a TimeoutError)
│   ├── MessageTimeoutError             no message came in time            (a TimeoutError)
│   ├── ChannelError                    a channel the run is not subscribed to
│   ├── ValueNotSetError                the run never set the value        (a LookupError)
│   ├── EventValidationError            an event's data does not fit the model (a ValueError)
│   ├── CompensationError               undoing failed; the run's own error is its cause
│   ├── HistoryLimitError               the run's history grew too long
│   ├── ChildDepthError                 children of children of children, without an end
│   ├── RemoteError                     a recorded error whose class is not to be found here
│   ├── NotAwaitedError                 a step was called without `await`, and so never done
│   └── ArgumentError                   arguments that do not fit the signature (a TypeError)
├── EventError                      what is not a CloudEvent, or not one we take (a ValueError)
├── EventDeliveryError              the receiver of an event did not take it
│   ├── EventRefusedError               and never will
│   └── EventPostponedError             and may take it later
├── InstanceNotFoundError           no run has this id                     (a LookupError)
├── InstanceConflictError           the id belongs to another workflow or input
├── NotFoundError                   no such event, worker, ...             (a LookupError)
├── ActionRefusedError              a run's state does not allow it
├── UnknownWorkflowError            this process has no such workflow      (a LookupError)
├── NotInWorkflowError              a verb outside its workflow, or real I/O inside one
├── ParkedError                     the run cannot go on until its code changes
│   ├── NonDeterminismError             the code no longer fits the history
│   ├── DeadlockError                   every branch waits for another one
│   ├── ProcessDiedError                its process dies each time it runs
│   └── SpinError                       the code runs on without waiting for anything
├── PayloadError                    a value that cannot be stored          (a ValueError)
│   └── PayloadTooLargeError
├── AppError                        no app, or no single app, to talk to
│   └── ConfigurationError              this process is not set up for what a step needs: its run is parked
├── LeaseLostError                  another worker took this one's runs
├── MigrationError                  the schema is not what this release needs
└── StorageError
    ├── StorageUnavailableError         no answer: what was sent may or may not be in
    │   ├── NotConnectedError               no connection: nothing was sent
    │   └── OutcomeUnknownError             no answer in time: it may or may not have happened
    ├── StorageConflictError            rolled back by a deadlock or a lock time-out: send it again
    │   └── StorageLockedError              a lock was not to be had in time
    └── StorageRejectedError            the database refuses the data itself
        └── StorageDuplicateError           a row with this key exists: another process wrote it
"""

from __future__ import annotations


class EddaError(Exception):
    """Base of everything Edda raises."""


class WorkflowError(EddaError):
    """Base of what a workflow's author or caller meets."""


class TerminalError(WorkflowError):
    """Raise it in an activity to fail at once: it is never retried."""


class RetryExhaustedError(WorkflowError):
    """An activity failed on its last attempt; the last failure is its `__cause__`."""


class ActivityTimeoutError(WorkflowError, TimeoutError):
    """An attempt of an activity did not end within `@activity(timeout=...)`."""


class HeartbeatTimeoutError(ActivityTimeoutError):
    """An attempt of an activity gave no sign of life within `@activity(heartbeat_timeout=...)`."""


class ActivityCancelledError(WorkflowError):
    """An attempt of an activity ended in `asyncio.CancelledError` that Edda did not ask for. It is retried."""


class WorkflowCancelledError(WorkflowError):
    """The run was cancelled."""


class WorkflowTimeoutError(WorkflowError, TimeoutError):
    """The run passed the deadline given with `options(timeout=...)`."""


class EventTimeoutError(WorkflowError, TimeoutError):
    """No event came within `timeout_seconds`."""


class MessageTimeoutError(WorkflowError, TimeoutError):
    """No message came within `timeout_seconds`."""


class ChannelError(WorkflowError):
    """The run is not subscribed to the channel, or in another mode."""


class ValueNotSetError(WorkflowError, LookupError):
    """The run has ended, and never set the value that was asked for with `handle.wait()`."""


class EventValidationError(WorkflowError, ValueError):
    """The data of an event does not fit the model that `wait_event` was given; the message names every field."""


class CompensationError(WorkflowError):
    """Compensations failed for good, each with a note; what made the run fail is the `__cause__`."""


class HistoryLimitError(WorkflowError):
    """The history of a run grew beyond its limit: let the workflow `recur`."""


class ChildDepthError(WorkflowError):
    """A workflow started a child that started a child, too many times over."""


class RemoteError(WorkflowError):
    """Stands for a recorded error whose class cannot be found in this process."""


class NotAwaitedError(WorkflowError):
    """The workflow's function returned though it had called a step without `await`: the step was never done."""


class ArgumentError(WorkflowError, TypeError):
    """The arguments do not fit the signature; nothing was stored."""


class EventError(EddaError, ValueError):
    """Not a CloudEvent, or not one that is taken here; `attribute` is what is wrong, `status` the HTTP answer."""

    def __init__(self, message: str, *, attribute: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.attribute = attribute
        self.status = status


class EventDeliveryError(EddaError):
    """The receiver of an event did not take it; `retryable` says whether sending it again may help."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class EventRefusedError(EventDeliveryError):
    """Raised by a sink: the receiver will never take the event, so it is not sent again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=False)


class EventPostponedError(EventDeliveryError):
    """Raised by a sink: the event is to be sent again, `after` so many seconds if the receiver says when."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class InstanceNotFoundError(EddaError, LookupError):
    """No run has this id."""


class InstanceConflictError(EddaError):
    """The chosen id belongs to a run of another workflow or with other input."""


class NotFoundError(EddaError, LookupError):
    """There is no such event, worker, outgoing event or whatever else was asked for."""


class ActionRefusedError(EddaError):
    """The state of a run does not allow what it was asked to do; the message says what does."""


class UnknownWorkflowError(EddaError, LookupError):
    """The workflow is not registered in this process."""


class NotInWorkflowError(EddaError, RuntimeError):
    """A verb used outside its workflow, or real I/O inside a workflow's body."""


class ParkedError(EddaError):
    """The run cannot go on with this code; it is kept and tried again."""


class NonDeterminismError(ParkedError):
    """The code no longer fits the history that was recorded."""


class DeadlockError(ParkedError):
    """Every branch of the workflow waits for another branch."""


class ProcessDiedError(ParkedError):
    """The process died each time it ran a step of this run; the message names the step and how often."""


class SpinError(ParkedError):
    """The workflow's code runs on without waiting for anything durable."""


class PayloadError(EddaError, ValueError):
    """A value that cannot be stored; the message has the path to it."""


class PayloadTooLargeError(PayloadError):
    """A value over the size limit."""


class AppError(EddaError, RuntimeError):
    """There is no app, or no single app, that the call could mean."""


class ConfigurationError(AppError):
    """This process is not set up for what a step needs, such as a package that is not installed. The run is parked, and
    goes on in a process that is."""


class LeaseLostError(EddaError):
    """Another worker took over this worker's runs."""


class MigrationError(EddaError):
    """The database's schema is not what this release needs."""


class StorageError(EddaError):
    """Base of what a database did not do."""


class StorageUnavailableError(StorageError):
    """The database did not answer; what was sent may or may not be committed."""


class NotConnectedError(StorageUnavailableError):
    """There is no connection to the database; nothing was sent."""


class OutcomeUnknownError(StorageUnavailableError):
    """The database did not answer within `Settings.call_timeout`; what was asked for may or may not have happened, and
    the message says how to find out."""


class StorageConflictError(StorageError):
    """A deadlock or a lock time-out rolled the transaction back; sending it again is safe."""


class StorageLockedError(StorageConflictError):
    """Another transaction holds a lock for too long; nothing was written, and sending it again is safe."""


class StorageRejectedError(StorageError):
    """The database refuses the data itself; sending it again cannot help."""


class StorageDuplicateError(StorageRejectedError):
    """A row with the same key exists. For a row of a run it means that another worker drives the run."""
