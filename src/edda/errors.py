"""All errors that Edda raises, in one tree.

EddaError
├── WorkflowError                   raised in workflow code, or to callers of a workflow
│   ├── TerminalError                   raised by an activity: do not retry
│   ├── RetryExhaustedError             an activity failed on its last attempt
│   ├── ActivityTimeoutError            an attempt exceeded its time limit (a TimeoutError)
│   │   └── HeartbeatTimeoutError           an attempt sent no heartbeat in time
│   ├── ActivityCancelledError          an attempt was cancelled by its own code
│   ├── WorkflowCancelledError          the run was cancelled
│   ├── WorkflowTimeoutError            the run passed its deadline        (a TimeoutError)
│   ├── EventTimeoutError               no event arrived in time           (a TimeoutError)
│   ├── MessageTimeoutError             no message arrived in time         (a TimeoutError)
│   ├── ChannelError                    the run is not subscribed to the channel
│   ├── ValueNotSetError                the run ended without setting the value (a LookupError)
│   ├── EventValidationError            an event's data does not fit the model (a ValueError)
│   ├── CompensationError               a compensation failed; the run's own error is the cause
│   ├── HistoryLimitError               the run's history exceeds its limit
│   ├── ChildDepthError                 child runs are nested too deeply
│   ├── RemoteError                     a recorded error whose class this process cannot import
│   ├── NotAwaitedError                 a step was called without `await`, so it did not run
│   └── ArgumentError                   the arguments do not fit the signature (a TypeError)
├── EventError                      an invalid CloudEvent, or one that is not accepted (a ValueError)
├── EventDeliveryError              the receiver did not accept an event
│   ├── EventRefusedError               it never will: the event is not sent again
│   └── EventPostponedError             it may accept the event later
├── InstanceNotFoundError           no run has this id                     (a LookupError)
├── InstanceConflictError           the id belongs to a run of another workflow or with other input
├── NotFoundError                   no such event, worker, outbox event, ... (a LookupError)
├── ActionRefusedError              the run's state does not allow the action
├── UnknownWorkflowError            this process has no such workflow      (a LookupError)
├── NotInWorkflowError              a workflow function called outside a workflow, or I/O inside one
├── ParkedError                     the run cannot continue with this code; it is kept and tried again
│   ├── NonDeterminismError             the code does not fit the recorded history
│   ├── DeadlockError                   every task of the workflow waits for another task
│   ├── ProcessDiedError                the process died each time it ran a step of this run
│   └── SpinError                       the code loops without waiting for anything durable
├── PayloadError                    a value that cannot be stored          (a ValueError)
│   └── PayloadTooLargeError            a value over the size limit
├── AppError                        no started app, or several, or one in the wrong state
│   └── ConfigurationError              this process lacks something that a step needs
├── LeaseLostError                  another worker took over this worker's runs
├── MigrationError                  the database schema does not fit this release
└── StorageError                    the database did not do what it was asked to
    ├── StorageUnavailableError         no answer: the statements may or may not be committed
    │   ├── NotConnectedError               no connection: nothing was sent
    │   └── OutcomeUnknownError             no answer within `call_timeout`
    ├── StorageConflictError            rolled back by a deadlock or a lock time-out: send it again
    │   └── StorageLockedError              another transaction held a lock for too long
    └── StorageRejectedError            the database rejects the data itself
        └── StorageDuplicateError           a row with this key exists: another process wrote it
"""

from __future__ import annotations


class EddaError(Exception):
    """Base class of all errors that Edda raises."""


class WorkflowError(EddaError):
    """Base class of errors that are raised in workflow code, or to callers of a workflow."""


class TerminalError(WorkflowError):
    """Raise it in an activity to fail the step at once: it is never retried."""


class RetryExhaustedError(WorkflowError):
    """An activity failed on its last attempt; `__cause__` is the error of that attempt."""


class ActivityTimeoutError(WorkflowError, TimeoutError):
    """An attempt of an activity did not end within `@activity(timeout=...)` seconds."""


class HeartbeatTimeoutError(ActivityTimeoutError):
    """An attempt of an activity did not call `ctx.heartbeat()` within `@activity(heartbeat_timeout=...)` seconds."""


class ActivityCancelledError(WorkflowError):
    """An attempt of an activity ended with an `asyncio.CancelledError` that Edda did not cause. It is retried."""


class WorkflowCancelledError(WorkflowError):
    """The run was cancelled."""


class WorkflowTimeoutError(WorkflowError, TimeoutError):
    """The run passed the deadline that was set with `options(timeout=...)`."""


class EventTimeoutError(WorkflowError, TimeoutError):
    """`wait_event` received no event within `timeout_seconds`."""


class MessageTimeoutError(WorkflowError, TimeoutError):
    """`receive` got no message within `timeout_seconds`."""


class ChannelError(WorkflowError):
    """The run is not subscribed to the channel, or it is subscribed in another mode."""


class ValueNotSetError(WorkflowError, LookupError):
    """The run ended without setting the value that `handle.wait()` was called for."""


class EventValidationError(WorkflowError, ValueError):
    """The data of an event does not fit the `model` of the wait; the message lists the invalid fields."""


class CompensationError(WorkflowError):
    """Compensations failed on their last attempt, one note for each; `__cause__` is the error that failed the run."""


class HistoryLimitError(WorkflowError):
    """The history of a run exceeds `Settings.history_limit` entries: let the workflow call `ctx.recur`."""


class ChildDepthError(WorkflowError):
    """A child run would be nested deeper than `Settings.child_depth`."""


class RemoteError(WorkflowError):
    """Stands for a recorded error whose class this process cannot import."""


class NotAwaitedError(WorkflowError):
    """The workflow's function returned although it had called a step without `await`: the step did not run."""


class ArgumentError(WorkflowError, TypeError):
    """The arguments do not fit the signature of the workflow or activity; nothing was stored."""


class EventError(EddaError, ValueError):
    """An invalid CloudEvent, or one that is not accepted here.

    `attribute` is the name of the invalid attribute, if there is one; `status` is the HTTP status of the same error.
    """

    def __init__(self, message: str, *, attribute: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.attribute = attribute
        self.status = status


class EventDeliveryError(EddaError):
    """The receiver did not accept an event; `retryable` says whether sending it again may help."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class EventRefusedError(EventDeliveryError):
    """Raise it in a sink: the receiver will never accept the event, so it is not sent again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, retryable=False)


class EventPostponedError(EventDeliveryError):
    """Raise it in a sink: the event is sent again, `after` that many seconds if the receiver named a time."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class InstanceNotFoundError(EddaError, LookupError):
    """No run has this id."""


class InstanceConflictError(EddaError):
    """The chosen id belongs to a run of another workflow, or to a run with other input."""


class NotFoundError(EddaError, LookupError):
    """There is no event, worker, workflow, generation or outbox event with this name or number."""


class ActionRefusedError(EddaError):
    """The run's state does not allow the action; the message says which states do."""


class UnknownWorkflowError(EddaError, LookupError):
    """No workflow with this name is registered in this process: import the module that defines it."""


class NotInWorkflowError(EddaError, RuntimeError):
    """A function such as `sleep` or an activity was called outside a workflow, or I/O was attempted inside one."""


class ParkedError(EddaError):
    """The run cannot continue with the code of this process. It is kept, and a worker tries it again later."""


class NonDeterminismError(ParkedError):
    """The workflow called other steps, or other arguments, than its history has recorded."""


class DeadlockError(ParkedError):
    """Every task of the workflow waits for another task, and no step, timer or event is pending."""


class ProcessDiedError(ParkedError):
    """The process died each time it ran a step of this run; the message names the step and the number of deaths."""


class SpinError(ParkedError):
    """The workflow's code loops without waiting for anything durable."""


class PayloadError(EddaError, ValueError):
    """A value that cannot be stored; the message has the path to it, such as `$.items[3]`."""


class PayloadTooLargeError(PayloadError):
    """A value that takes more bytes than the limit; the message names its largest part."""


class AppError(EddaError, RuntimeError):
    """No app is started, several are, or the app is in the wrong state for the call."""


class ConfigurationError(AppError):
    """This process lacks something that a step needs, such as an installed package. The run is parked, and continues
    in a process that has it."""


class LeaseLostError(EddaError):
    """Another worker took over this worker's runs, because its lease had expired."""


class MigrationError(EddaError):
    """The database schema does not fit this release: run `edda migrate`, or use the matching release."""


class StorageError(EddaError):
    """Base class of errors of the database."""


class StorageUnavailableError(StorageError):
    """The database did not answer; the statements that were sent may or may not be committed."""


class NotConnectedError(StorageUnavailableError):
    """There is no connection to the database; nothing was sent."""


class OutcomeUnknownError(StorageUnavailableError):
    """The database did not answer within `Settings.call_timeout`. The call may or may not have taken effect; the
    message says how to find out."""


class StorageConflictError(StorageError):
    """A deadlock or a lock time-out rolled the transaction back; sending it again is safe."""


class StorageLockedError(StorageConflictError):
    """Another transaction held a lock for too long; nothing was written, and sending it again is safe."""


class StorageRejectedError(StorageError):
    """The database rejects the data itself; sending it again cannot help."""


class StorageDuplicateError(StorageRejectedError):
    """A row with the same key exists. For a row of a run this means that another worker drives the run."""
