"""Every error that crosses a socket, in one catalogue, both ways.

A server raises a FarmError; the interceptor sends it as google.rpc.Status with one ErrorInfo; `from_rpc` raises the
same class again at the caller. Anything else that a server raises is a bug.
"""

from typing import ClassVar

from google.rpc import code_pb2


class FarmError(Exception):
    """A mistake or a condition that the caller can do something about.

    The message is problem + remedy; every changing fact in it is also in `facts`. Below it, each class says who raises
    it and what the caller does.
    """

    code: ClassVar[int] = code_pb2.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    remedy: ClassVar[str] = ""

    def __init__(self, problem: str, /, **facts: object) -> None:
        self.problem = problem
        self.facts = {name: str(value) for name, value in facts.items()}
        super().__init__(f"{problem} {self.remedy}".strip())


class InvalidArgument(FarmError):
    """The request can never be carried out as it is.

    Raised by any service; the caller mends the request or the configuration behind it, and does not retry.
    """

    code = code_pb2.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"
    remedy = "Correct the request."


class InvalidTrajectory(FarmError):
    """A finished episode cannot be trained on: its arrays or versions disagree, or its reward is not finite.

    Raised by sample_buffer; env_manager fails the episode. Raised by the trainer too, of what it was leased: a bug.
    """

    code = code_pb2.INVALID_ARGUMENT
    reason = "INVALID_TRAJECTORY"
    remedy = "Fail the episode with its cause instead of completing it."


class TrajectoryTooLarge(FarmError):
    """A finished episode is larger than sample_buffer takes. Raised by sample_buffer; env_manager fails the episode."""

    code = code_pb2.INVALID_ARGUMENT
    reason = "TRAJECTORY_TOO_LARGE"
    remedy = "Shorten the episodes (fewer turns, smaller max_tokens), or raise sample_buffer.max_trajectory_bytes."


class UnknownRun(FarmError):
    """No run of this name is configured.

    Raised by sample_buffer to whoever names one; people correct the name or start the trainer.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_RUN"
    remedy = "Start the trainer, which configures the run, or correct run.name."


class RunMismatch(FarmError):
    """The run exists with other settings.

    Raised by sample_buffer's ConfigureRun; the trainer ends with a configuration error.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "RUN_MISMATCH"
    remedy = "Restore the settings that the run was started with, or choose another run.name."


class TrainerReplaced(FarmError):
    """Another trainer took the run over.

    Raised by sample_buffer in every call of the one before, which ends.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "TRAINER_REPLACED"
    remedy = "A run has one trainer: stop the other one, or give this one a run.name and a run.folder of its own."


class LeaseExpired(FarmError):
    """The lease is not out: it ended, was given back, or never was.

    Raised by sample_buffer; env_manager drops the result.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "LEASE_EXPIRED"
    remedy = "Drop the result; the episode was leased again."


class StepOutOfOrder(FarmError):
    """The batch of a step was asked for that is neither delivered nor next; `facts` has the next one.

    Raised by sample_buffer's LeaseBatch; the trainer ends.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "STEP_OUT_OF_ORDER"
    remedy = "Ask for the next step, or for one that was delivered and not committed."


class UnknownBatch(FarmError):
    """A step was committed with a batch that was never delivered for it.

    Raised by sample_buffer's CommitStep; the trainer ends.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "UNKNOWN_BATCH"
    remedy = "Commit only what LeaseBatch delivered."


class VersionOutOfOrder(FarmError):
    """The version does not follow the newest one, which `facts` has.

    Raised by sample_buffer, where the trainer ends, and by llm_proxy, where it goes on and brings the engines up later.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "VERSION_OUT_OF_ORDER"
    remedy = "Publish the newest version + 1."


class UnknownValidation(FarmError):
    """No validation of this id was started.

    Raised by sample_buffer's WaitValidation; the caller starts it first.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_VALIDATION"
    remedy = "Start it with StartValidation."


class UnknownTrajectory(FarmError):
    """No such trajectory was completed, or it is no longer retained.

    Raised by sample_buffer to people who look one up.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_TRAJECTORY"
    remedy = "List the retained ones with `rollfarm inspect`."


class JournalUnavailable(FarmError):
    """Nothing can be made durable at the moment.

    Raised by sample_buffer in every call that changes state; callers retry until Redis is back.
    """

    code = code_pb2.UNAVAILABLE
    reason = "JOURNAL_UNAVAILABLE"
    remedy = "Bring Redis back; sample_buffer resumes by itself and nothing acknowledged is lost."


class JournalFenced(FarmError):
    """A second sample_buffer took the journal over.

    Raised by the first one in every call from then on, and it ends; callers reach the second by retrying.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "JOURNAL_FENCED"
    remedy = "Stop the other sample_buffer, or give this one a journal of its own."


class UnknownEngine(FarmError):
    """No engine of this id is attached.

    Raised by llm_proxy; the caller lists those that are.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_ENGINE"
    remedy = "List the attached ones with `rollfarm status`."


class EngineFailed(FarmError):
    """An engine died, hangs or breaks its contract.

    Raised by llm_proxy of a generation that no engine made progress with, and of weight updates; the caller may retry.
    """

    code = code_pb2.UNAVAILABLE
    reason = "ENGINE_FAILED"
    remedy = "Look at the engine's log; llm_proxy continues its requests elsewhere."


class GenerationFailed(FarmError):
    """The weights give no finite probabilities.

    Raised by the engine of one generation; env_manager fails the episode.
    """

    code = code_pb2.INTERNAL
    reason = "GENERATION_FAILED"
    remedy = "Look at the trainer: the weights that it published give no finite probabilities."


class VersionUnavailable(FarmError):
    """The exact version that was asked for is gone; `facts` has the one that is served.

    Raised by llm_proxy; the caller asks for that one.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "VERSION_UNAVAILABLE"
    remedy = "Ask again with the served version, or without exact_version."


class VersionNotServed(FarmError):
    """The version that was asked for is not served yet; `facts` has the one that is.

    Raised by llm_proxy once a generation has waited as long as it may; the caller asks again.
    """

    code = code_pb2.UNAVAILABLE
    reason = "VERSION_NOT_SERVED"
    remedy = "Ask again later, or look why the trainer publishes nothing."


class QuotaExceeded(FarmError):
    """The tenant has as many requests open as it may.

    Raised by llm_proxy; the caller backs off, or an operator raises the tenant's quota.
    """

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"
    remedy = "Wait for some of them, or raise the tenant's quota in [llm_proxy.tenants]."


class Unsupported(FarmError):
    """The service cannot do this, or not as it was started.

    Raised by the engine, whose operator starts it otherwise, and by an evaluation in the trainer's place.
    """

    code = code_pb2.UNIMPLEMENTED
    reason = "UNSUPPORTED"
    remedy = "Start it with what this needs, or do without."


class HttpDisabled(FarmError):
    """This llm_proxy serves no HTTP, so no agent could use a session.

    Raised by llm_proxy; the operator enables it.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "HTTP_DISABLED"
    remedy = "Set [llm_proxy.http] enabled = true."


class UnknownAgentSession(FarmError):
    """The agent's session was never opened, has expired, or was lost when llm_proxy restarted.

    Raised by llm_proxy; the caller plays the episode anew.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_AGENT_SESSION"
    remedy = "Open a session first; a restarted llm_proxy forgets its sessions."


class SessionsFull(FarmError):
    """As many sessions are open as llm_proxy keeps.

    Raised by llm_proxy; the caller closes those that are done.
    """

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "SESSIONS_FULL"
    remedy = "Close sessions that are done, or raise llm_proxy.http.session_count."


class WeightsFailed(FarmError):
    """A transfer of weights broke off.

    Raised by the engine; the old weights keep serving, and the trainer sends them again.
    """

    code = code_pb2.UNAVAILABLE
    reason = "WEIGHTS_FAILED"
    remedy = "The old weights keep serving; publish again."


class WeightsMismatch(FarmError):
    """The weights do not fit the model: a tensor is missing, unknown or misshaped.

    Raised by the engine, whose old weights keep serving; people give both ends the same model.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "WEIGHTS_MISMATCH"
    remedy = "Give trainer and engine the same model; the old weights keep serving."


class WeightsBaseMismatch(FarmError):
    """A delta changes a version that the engine does not serve.

    Raised by the engine, whose old weights keep serving; the trainer sends it the whole version.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "WEIGHTS_BASE_MISMATCH"
    remedy = "Send this engine the whole version."


class WeightsNotStaged(FarmError):
    """No engine has the version in memory, or this one has not.

    Raised by llm_proxy and the engine when it is to be put to use; the trainer sends it again.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "WEIGHTS_NOT_STAGED"
    remedy = "Begin the update again."


class UnknownEnvironment(FarmError):
    """Nobody plays an environment of this name; the message lists the known ones.

    Raised by env_manager and by environment servers; the episode fails.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_ENVIRONMENT"
    remedy = "Correct the domain's environment, or attach a server that plays it."


class UnknownSession(FarmError):
    """The episode was not reset, or was closed or forgotten.

    Raised by environment servers; the caller resets first, and env_manager fails the episode.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_SESSION"
    remedy = "Reset first; a restarted environment server forgets its episodes."


class EnvironmentFailed(FarmError):
    """An environment raised, hung, went away or broke its contract.

    Raised by env_manager and by environment servers; the episode fails and is leased again.
    """

    code = code_pb2.INTERNAL
    reason = "ENVIRONMENT_FAILED"
    remedy = "Mend the environment; the episode is leased again."


class WrongToken(FarmError):
    """The caller's token is missing or wrong.

    Raised by env_manager to a worker that dials in; people correct the token.
    """

    code = code_pb2.UNAUTHENTICATED
    reason = "WRONG_TOKEN"
    remedy = "Give the worker the token of env_manager.attach_token."


class PackageMissing(FarmError):
    """An environment or a reward needs a package, or its data, that is not installed.

    Raised by env_manager's adapters and by rewards; people install it.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "PACKAGE_MISSING"
    remedy = "Install what is missing where this service runs."


class SandboxUnavailable(FarmError):
    """Nothing on this machine can keep model-written code in, so that none is run.

    Raised by env_manager and reward_gateway; the episode fails, and people install a sandbox.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "SANDBOX_UNAVAILABLE"
    remedy = "Install bubblewrap, or run on Linux 6.12 or newer (as root, 5.13), or give access to docker."


class SandboxFailed(FarmError):
    """The sandbox itself failed, and not the program in it.

    Raised by env_manager and reward_gateway; the episode fails with this cause, and is never scored 0.
    """

    code = code_pb2.INTERNAL
    reason = "SANDBOX_FAILED"
    remedy = "The episode is played again; look at the service's log if it happens often."


class AgentFailed(FarmError):
    """An agent that plays an episode by itself exited with an error, hung or could not be started.

    Raised by env_manager; the episode fails and is leased again.
    """

    code = code_pb2.INTERNAL
    reason = "AGENT_FAILED"
    remedy = "Mend the agent; its last output is in the cause."


class EndpointFailed(FarmError):
    """A model behind an OpenAI-compatible endpoint gave no usable answer: a judge, a simulated user.

    Raised by whoever asks; the episode fails with this cause, and is never scored 0.
    """

    code = code_pb2.INTERNAL
    reason = "ENDPOINT_FAILED"
    remedy = "Check that the endpoint runs and that its base_url, model and key are right."


class UnknownDomain(FarmError):
    """No reward is configured for the domain; the message lists the known ones.

    Raised by reward_gateway; the episode fails.
    """

    code = code_pb2.NOT_FOUND
    reason = "UNKNOWN_DOMAIN"
    remedy = "Add [reward_gateway.domains.NAME] with its rewards."


class RewardFailed(FarmError):
    """A reward raised, hung or gave no finite number.

    Raised by reward_gateway and by external scorers; the episode fails, and is never scored 0.
    """

    code = code_pb2.INTERNAL
    reason = "REWARD_FAILED"
    remedy = "Mend the reward function; the episode is played again and is never scored 0."


class CheckpointFailed(FarmError):
    """The trainer could not save. It goes on all the same, and tries again at the next checkpoint.

    Raised by the trainer to whoever asked for a checkpoint; people see to the disk, and ask again.
    """

    code = code_pb2.FAILED_PRECONDITION
    reason = "CHECKPOINT_FAILED"
    remedy = "Ask again once that is done; training goes on meanwhile."


class Unavailable(FarmError):
    """The service cannot be reached, or is stopping.

    Raised at the caller, and by a trainer that stops. `rpc.call` has retried it already, unless told not to.
    """

    code = code_pb2.UNAVAILABLE
    reason = "UNAVAILABLE"
    remedy = "Check that the service runs and that the address is right."


class InvalidAnswer(Unavailable):
    """The service answered with what is no message. Raised at the caller; asking again gives the same answer."""

    remedy = "Mend the service: it breaks the contract, for example by text that is not UTF-8."


class DeadlineExceeded(FarmError):
    """There was no answer in time; whether the call took effect is not known.

    Raised at the caller, and by services that see that they will be too late. The caller may ask again with more time.
    """

    code = code_pb2.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
    remedy = "Raise the timeout, or find out what the service waits for."


CATALOGUE: dict[str, type[FarmError]] = {error.reason: error for error in FarmError.__subclasses__()}


def is_retryable(error: FarmError) -> bool:
    """Whether the same idempotent call may succeed later, with nothing changed by the caller."""
    return error.code == code_pb2.UNAVAILABLE
