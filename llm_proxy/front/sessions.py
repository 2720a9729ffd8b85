"""The sessions of agents: who may ask, how their requests are sampled, and what is kept of them.

Pure: time is an argument. Invariants: a key opens one open session and no other; a session with a request open never
expires; there are never more than `most` sessions, those that are closed and kept for a repeated CloseSession included.
"""

from dataclasses import dataclass, field

from llm_proxy.front.keys import Keys, Mint
from llm_proxy.front.record import Record
from rollfarm.errors import InvalidArgument, SessionsFull, UnknownAgentSession
from rollfarm.generation import check_sampling
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2


@dataclass(slots=True, eq=False)
class Session:
    """One agent's session."""

    asked: llm_proxy_pb2.OpenSessionRequest
    nonce: bytes
    idle_seconds: float
    used: float
    """When it was last opened, asked or answered, seconds."""

    record: Record = field(default_factory=Record)
    requests: set[str] = field(default_factory=set[str])
    """Ids of its open generations."""

    request_count: int = 0
    """Generations asked for; tells their seeds apart."""

    is_closed: bool = False

    @property
    def session_id(self) -> str:
        return self.asked.session_id

    def has_expired(self, now: float) -> bool:
        return not self.requests and now - self.used > self.idle_seconds


class Sessions:
    """Every session of this llm_proxy."""

    def __init__(self, *, most: int, idle_seconds: float) -> None:
        self._most = most
        self._idle_seconds = idle_seconds
        self._mint = Mint()
        self._keys: Keys[Session] = Keys()
        self._sessions: dict[str, Session] = {}

    @property
    def open_count(self) -> int:
        return sum(not session.is_closed for session in self._sessions.values())

    def open(self, asked: llm_proxy_pb2.OpenSessionRequest, now: float) -> str:
        """Open a session, or find the open one of the same id; its key.

        Raises InvalidArgument when one of this id is different or was closed, and SessionsFull.
        """
        if not asked.session_id:
            raise InvalidArgument("session_id is empty; choose a unique one.", field="session_id")
        if asked.idle_duration.seconds < 0 or asked.idle_duration.nanos < 0:
            raise InvalidArgument("idle_duration is less than nothing.", field="idle_duration")
        _check_sampling(asked.sampling)
        session = self._sessions.get(asked.session_id)
        if session is None or session.has_expired(now):
            session = self._new(asked, now)
        elif session.is_closed or session.asked != asked:
            how = "was closed" if session.is_closed else "is open and different"
            raise InvalidArgument(f"Session {asked.session_id!r} {how}.", session_id=asked.session_id)
        session.used = now
        return self._mint.key(session.nonce)

    def find(self, key: str, now: float) -> Session | None:
        """The open session that the key opens."""
        session = self._keys.find(key)
        if session is None or session.has_expired(now):
            return None
        session.used = now
        return session

    def get(self, session_id: str, now: float) -> Session:
        """An open session, or one that was closed a short while ago. Raises UnknownAgentSession."""
        session = self._sessions.get(session_id)
        if session is None or session.has_expired(now):
            raise UnknownAgentSession(f"There is no session {session_id!r}.", session_id=session_id)
        return session

    def close(self, session_id: str, now: float) -> Session:
        """Refuse its key from now on. Its requests are the caller's to cancel. Raises UnknownAgentSession."""
        session = self.get(session_id, now)
        if not session.is_closed:
            session.is_closed, session.used = True, now
            self._keys.remove(self._mint.key(session.nonce))
        return session

    def expire(self, now: float) -> None:
        """Forget what was not used for as long as it may lie idle."""
        for session in [session for session in self._sessions.values() if session.has_expired(now)]:
            self._forget(session)

    def _new(self, asked: llm_proxy_pb2.OpenSessionRequest, now: float) -> Session:
        if (expired := self._sessions.get(asked.session_id)) is not None:
            self._forget(expired)
        if len(self._sessions) >= self._most:
            self.expire(now)
        if len(self._sessions) >= self._most:
            self._drop_closed()
        kept = llm_proxy_pb2.OpenSessionRequest()
        kept.CopyFrom(asked)
        idle = asked.idle_duration.seconds + asked.idle_duration.nanos / 1e9
        session = Session(kept, self._mint.nonce(), idle or self._idle_seconds, now)
        self._sessions[asked.session_id] = session
        self._keys.add(self._mint.key(session.nonce), session)
        return session

    def _drop_closed(self) -> None:
        """Make room by the session that was closed first. Raises SessionsFull where none is closed."""
        closed = [session for session in self._sessions.values() if session.is_closed]
        if not closed:
            raise SessionsFull(f"{self._most} sessions are open, which is the most.", session_count=self._most)
        self._forget(min(closed, key=lambda session: session.used))

    def _forget(self, session: Session) -> None:
        session.is_closed = True
        del self._sessions[session.session_id]
        self._keys.remove(self._mint.key(session.nonce))


def _check_sampling(bound: trajectory_pb2.Sampling) -> None:
    """Raise InvalidArgument where no request could be sampled so. max_tokens of 0 is no bound."""
    sampling = trajectory_pb2.Sampling()
    sampling.CopyFrom(bound)
    sampling.max_tokens = sampling.max_tokens or 1
    check_sampling(sampling, vocabulary_size=0)
