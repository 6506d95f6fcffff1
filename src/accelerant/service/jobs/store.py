"""The job store: one table of jobs in SQLite or PostgreSQL, which several servers may share.

    queued --claim--> running --finish--> succeeded | failed | cancelled
       ^                 |
       +----release------+   worker lost, server gone, server stopping

A server holds a job that it runs by a lease, which it renews; a job whose lease has expired belongs to a server that is
gone, and any other takes it over. `owner` and `attempts` fence the old server: what it still writes about the job
changes nothing. A claim locks the row (FOR UPDATE SKIP LOCKED on PostgreSQL; SQLite has one writer at a time), so that
no two servers run the same attempt.

The arrays of a job are files in a directory that the servers share; `volume` names it, and a server claims only jobs of
its own volume.

The schema only grows (see migrations/), and statements name their columns, so that an older version of the service
works on a store that a newer one has upgraded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite

from accelerant.errors import ConfigError, MissingDependency
from accelerant.service.errors import JobNotFound, QueueFull, StoreUnavailable
from accelerant.service.jobs.wire import Job, JobState

_metadata = sa.MetaData()
_jobs = sa.Table(
    "accelerant_jobs",
    _metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("operation", sa.String(100)),
    sa.Column("parameters", sa.Text),
    sa.Column("state", sa.String(10)),
    sa.Column("progress", sa.Double),
    sa.Column("message", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("key_id", sa.String(100)),
    sa.Column("priority", sa.Integer),
    sa.Column("request_id", sa.String(100)),
    sa.Column("created", sa.Double),
    sa.Column("started", sa.Double),
    sa.Column("finished", sa.Double),
    sa.Column("deadline", sa.Double),
    sa.Column("input_bytes", sa.BigInteger),
    sa.Column("result_bytes", sa.BigInteger),
    sa.Column("volume", sa.String(32)),
    sa.Column("attempts", sa.Integer),  # times that it was started
    sa.Column("losses", sa.Integer),  # attempts that ended with the worker or the server, since the last progress
    sa.Column("mark", sa.Double),  # the progress at the last loss
    sa.Column("device", sa.String(100)),
    sa.Column("avoid", sa.String(200)),  # owner and device of the last loss
    sa.Column("owner", sa.String(32)),
    sa.Column("lease", sa.Double),
    sa.Column("cancel", sa.Boolean),
)
_turns = sa.Table(
    "accelerant_turns",
    _metadata,
    sa.Column("key_id", sa.String(100), primary_key=True),
    sa.Column("claimed", sa.Double),
)
_schema = sa.Table("accelerant_schema", _metadata, sa.Column("oldest_revision", sa.Integer))

_JOB = [_jobs.c[name] for name in Job.__dataclass_fields__]
_QUEUED, _RUNNING = JobState.QUEUED.value, JobState.RUNNING.value
_FINAL = [state.value for state in JobState if state.final]
_ENDED = {"parameters": "{}", "lease": None}
"""Values of every job that has ended; its parameters may be a client's secrets."""

REVISION = 1  # the revision of the schema that this version of the service was written for

_LOCK = 0x61636C6A
"""Number of the PostgreSQL advisory lock under which jobs are counted and added, and the schema is upgraded."""

_TIME_LIMITS = {"pg8000": {"timeout": 10.0}, "psycopg": {"connect_timeout": 10, "tcp_user_timeout": 10_000}}
"""Arguments of drivers, so that a database whose machine is gone is an error after seconds, and does not hang."""

_SLICE = 10_000
"""Most jobs that one statement names or one transaction removes; SQLite takes 32,766 parameters, PostgreSQL 65,535."""

_MOST_ENDED = 100_000  # most jobs that are kept after their end, whatever the retention

_VERSION_TABLE = "accelerant_version"
_MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True)
class Claim:
    """A job that this server has started an attempt of."""

    job: Job
    parameters: dict[str, Any]
    deadline: float | None
    request_id: str


class JobStore:
    """The jobs of all servers that use the same URL (SQLite or PostgreSQL); methods block, times are since the epoch.

    `owner` is this process, `volume` the directory with the arrays of its jobs. `resumable` operations continue from
    their files; a job whose server has not renewed its lease for `lease_s` is taken over.
    """

    def __init__(
        self, url: str, *, owner: str, volume: str, resumable: Collection[str] = (), lease_s: float = 15.0
    ) -> None:
        self.owner, self.volume, self.resumable, self.lease_s = owner, volume, resumable, lease_s
        try:
            parsed = sa.make_url(url)
            self._sqlite = parsed.get_backend_name() == "sqlite"
            if not self._sqlite and parsed.get_backend_name() != "postgresql":
                raise ConfigError(f"state_url must be of sqlite or postgresql, got {parsed.get_backend_name()!r}")
            if parsed.drivername == "postgresql":
                driver = "psycopg" if importlib.util.find_spec("psycopg") else "pg8000"
                parsed = parsed.set(drivername=f"postgresql+{driver}")
            if self._sqlite:
                self.engine = sa.create_engine(parsed, connect_args={"timeout": 30.0})
                _serialize(self.engine)
            else:
                limits = _TIME_LIMITS.get(parsed.get_driver_name(), {})
                self.engine = sa.create_engine(parsed, pool_pre_ping=True, pool_size=8, connect_args=limits)
        except sa.exc.ArgumentError:
            raise ConfigError("state_url is not a URL as sqlite:///PATH or postgresql://USER@HOST/NAME") from None
        except ModuleNotFoundError as error:
            raise MissingDependency(str(error.name), "service", "a job store in PostgreSQL") from None

        self._readers = self.engine.execution_options(reads=True)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    @contextmanager
    def _begin(self, *, alone: bool = False, reads: bool = False) -> Iterator[sa.Connection]:
        """Begin a transaction; with `alone`, no other of this kind runs at the same time; `reads` says it only does."""
        with (self._readers if reads else self.engine).begin() as connection:
            if alone and not self._sqlite:  # transactions on SQLite that write are alone always
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    # --- schema ------------------------------------------------------------------------------------------------------
    def upgrade(self, migrations: Path = _MIGRATIONS, known: int = REVISION) -> None:
        """Create or upgrade the schema, but for one newer than `known`; ConfigError if that excludes this version."""
        config = Config(attributes={"version_table": _VERSION_TABLE})
        config.set_main_option("script_location", str(migrations).replace("%", "%%"))
        ours = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
        try:
            with self._begin(alone=True) as connection:
                context = MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE})
                current = context.get_current_revision()
                if current is None or current in ours:
                    config.attributes["connection"] = connection
                    command.upgrade(config, "head")
                oldest = connection.execute(sa.select(_schema.c.oldest_revision)).scalar_one()
        except sa.exc.DBAPIError as error:
            raise StoreUnavailable(f"cannot use {self.engine.url.render_as_string()}: {error.orig}") from None
        if oldest > known:
            raise ConfigError(
                f"the job store has schema {current}, which needs a service of schema {oldest} or newer; "
                f"this one has {known}: upgrade accelerant"
            )

    # --- callers -----------------------------------------------------------------------------------------------------
    def add(self, row: Mapping[str, Any], *, most_jobs: int, most_bytes: int, retry_after_s: float) -> Job:
        """Add a queued job; raise QueueFull if the queued jobs of all servers, or those of its key, reach a bound."""
        own = _jobs.c.key_id == row["key_id"]
        count, size = sa.func.count(), sa.func.sum(_jobs.c.input_bytes)
        waiting = sa.select(count, size, count.filter(own), size.filter(own)).where(_jobs.c.state == _QUEUED)
        values = {
            "state": _QUEUED, "progress": 0.0, "message": "", "created": time.time(), "volume": self.volume,
            "attempts": 0, "losses": 0, "mark": 0.0, "cancel": False, **row,
        }  # fmt: skip
        with self._begin(alone=True) as connection:
            held = [int(value or 0) for value in connection.execute(waiting).one()]
            check_bounds(held[:2], held[2:], row["input_bytes"], most_jobs, most_bytes, retry_after_s)
            connection.execute(_jobs.insert().values(values))
        return _job({name: values.get(name) for name in Job.__dataclass_fields__})

    def get(self, id: str, key_id: str | None) -> Job:
        """Return a job; raise JobNotFound if there is none, or it belongs to another key than `key_id`."""
        query = sa.select(*_JOB).where(_jobs.c.id == _storable(id))
        if key_id is not None:
            query = query.where(_jobs.c.key_id == key_id)
        with self._begin(reads=True) as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise JobNotFound(f"no job {id[:64]!r}")
        return _job(row)

    def jobs(
        self, key_id: str | None, state: JobState | None = None, limit: int = 100, before: str | None = None
    ) -> list[Job]:
        """Return jobs, the newest first, from the one that follows the job `before` in that order."""
        query = sa.select(*_JOB).order_by(_jobs.c.created.desc(), _jobs.c.id.desc()).limit(limit)
        if key_id is not None:
            query = query.where(_jobs.c.key_id == key_id)
        if state is not None:
            query = query.where(_jobs.c.state == state.value)
        if before is not None:
            last = self.get(before, key_id)
            query = query.where(sa.tuple_(_jobs.c.created, _jobs.c.id) < sa.tuple_(last.created, last.id))
        with self._begin(reads=True) as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def cancel(self, id: str) -> bool:
        """Cancel a queued job and return True, or ask the server that runs it to."""
        with self._begin() as connection:
            connection.execute(sa.select(_jobs.c.id).where(_jobs.c.id == id).with_for_update())
            done = connection.execute(
                _jobs.update()
                .where(_jobs.c.id == id, _jobs.c.state == _QUEUED)
                .values(
                    state=JobState.CANCELLED.value, finished=time.time(), message="cancelled before it ran", **_ENDED
                )
            )
            if done.rowcount:
                return True
            connection.execute(_jobs.update().where(_jobs.c.id == id, _jobs.c.state == _RUNNING).values(cancel=True))
            return False

    def counts(self) -> tuple[dict[str, int], int]:
        """Return the number of jobs by state, and the bytes of the inputs of those that are queued."""
        columns = (_jobs.c.state, sa.func.count().label("total"), sa.func.sum(_jobs.c.input_bytes).label("size"))
        with self._begin(reads=True) as connection:
            rows = connection.execute(sa.select(*columns).group_by(_jobs.c.state)).all()
        return {row.state: row.total for row in rows}, sum(int(row.size or 0) for row in rows if row.state == _QUEUED)

    # --- the server that runs jobs -----------------------------------------------------------------------------------
    def claim(self, device: str, operations: Iterable[str], *, alone: bool = True) -> Claim | None:
        """Start an attempt of the next queued job on a device, or return None if there is none.

        The key that was served the longest ago comes first; of its jobs the one of the highest priority, then the
        oldest. A job that lost its worker here goes to another device, unless this one is `alone`.
        """
        now = time.time()
        place = f"{self.owner}/{device}"
        ready = [_jobs.c.state == _QUEUED, _jobs.c.volume == self.volume, _jobs.c.operation.in_(sorted(operations))]
        if not alone:
            ready.append(sa.or_(_jobs.c.avoid.is_(None), _jobs.c.avoid != place))
        served = sa.case((_turns.c.claimed <= now, _turns.c.claimed), else_=0.0)  # a clock may have been set back
        query = (
            sa.select(_jobs.c.id, _jobs.c.key_id)
            .select_from(_jobs.outerjoin(_turns, _turns.c.key_id == _jobs.c.key_id))
            .where(*ready)
            .order_by(served, _jobs.c.priority.desc(), _jobs.c.created, _jobs.c.id)
            .limit(1)
            .with_for_update(skip_locked=True, of=_jobs)
        )
        with self._begin() as connection:
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            values = {
                "state": _RUNNING, "owner": self.owner, "device": device, "lease": now + self.lease_s, "started": now,
                "attempts": _jobs.c.attempts + 1, "error": None,
            }  # fmt: skip
            connection.execute(_jobs.update().where(_jobs.c.id == row.id).values(values))
            insert = sqlite.insert if self._sqlite else postgresql.insert
            turn = insert(_turns).values(key_id=row.key_id, claimed=now)
            connection.execute(turn.on_conflict_do_update(index_elements=["key_id"], set_={"claimed": now}))
            columns = [*_JOB, _jobs.c.parameters, _jobs.c.deadline, _jobs.c.request_id]
            full = connection.execute(sa.select(*columns).where(_jobs.c.id == row.id)).mappings().one()
        return Claim(_job(full), json.loads(full["parameters"]), full["deadline"], full["request_id"] or "")

    def _mine(self, job: Job) -> sa.ColumnElement[bool]:
        return sa.and_(_jobs.c.state == _RUNNING, *self._attempt(job))

    def _attempt(self, job: Job) -> tuple[sa.ColumnElement[bool], ...]:
        return _jobs.c.id == job.id, _jobs.c.owner == self.owner, _jobs.c.attempts == job.attempts

    def _change(self, job: Job, **values: Any) -> bool:
        with self._begin() as connection:
            return bool(connection.execute(_jobs.update().where(self._mine(job)).values(**values)).rowcount)

    def report(self, job: Job, progress: float, message: str) -> bool:
        """Write the progress of a job that this server runs; return whether it still does."""
        return self._change(job, progress=progress, message=_storable(message))

    def finish(self, job: Job, state: JobState, *, error: str | None = None, result_bytes: int | None = None) -> bool:
        """End a job that this server runs; return whether it still did, or ended it in a call whose answer was lost."""
        error = None if error is None else _storable(error)
        values = {**_ENDED, "state": state.value, "error": error, "result_bytes": result_bytes, "finished": time.time()}
        if state is JobState.SUCCEEDED:
            values["progress"] = 1.0
        with self._begin() as connection:
            if connection.execute(_jobs.update().where(self._mine(job)).values(values)).rowcount:
                return True
            return (
                connection.execute(sa.select(_jobs.c.state).where(*self._attempt(job))).scalar_one_or_none()
                == state.value
            )

    def release(self, job: Job, *, lost: str = "", counted: bool = True) -> JobState | None:
        """Give a job that this server runs back to the queue; return its new state, or None if it runs elsewhere.

        With `lost`, the reason why its worker or device was lost, the second loss fails the job; of a resumable one the
        second without progress in between. A loss that is not `counted` had another reason than the job.
        """
        with self._begin() as connection:
            return self._release(connection, self._mine(job), lost, f"{self.owner}/{job.device}", counted)

    def _release(
        self, connection: sa.Connection, which: sa.ColumnElement[bool], lost: str, avoid: str | None, counted: bool
    ) -> JobState | None:
        columns = [_jobs.c.id, _jobs.c.operation, _jobs.c.losses, _jobs.c.mark, _jobs.c.progress, _jobs.c.cancel]
        row = connection.execute(sa.select(*columns).where(which).with_for_update()).one_or_none()
        if row is None:
            return None
        resumable = row.operation in self.resumable
        losses = (0 if resumable and row.progress > row.mark else row.losses) + bool(lost and counted)
        values: dict[str, Any] = {"owner": None, "lease": None}
        if row.cancel:
            state = JobState.CANCELLED
            values |= {**_ENDED, "finished": time.time(), "message": "cancelled"}
        elif losses > 1:
            state = JobState.FAILED
            values |= {**_ENDED, "finished": time.time(), "error": f"WorkerLost: {lost}, for the second time"}
        else:
            state = JobState.QUEUED
            values["message"] = f"{lost or 'the server stopped'}; it runs again"
            if not resumable:
                values["progress"] = 0.0
        if lost:
            values |= {"losses": losses, "mark": row.progress, "avoid": avoid}
        connection.execute(_jobs.update().where(_jobs.c.id == row.id).values(state=state.value, **values))
        return state

    def renew(self, jobs: Sequence[Job]) -> tuple[set[str], set[str]]:
        """Renew the leases of jobs that run here; return the ids of those still held, and of those to cancel."""
        held, cancelled = set(), set()
        with self._begin() as connection:
            for job in jobs:
                lease = time.time() + self.lease_s
                if connection.execute(_jobs.update().where(self._mine(job)).values(lease=lease)).rowcount:
                    held.add(job.id)
                    if connection.execute(sa.select(_jobs.c.cancel).where(_jobs.c.id == job.id)).scalar_one():
                        cancelled.add(job.id)
        return held, cancelled

    def take_over(self, running: Collection[str] = ()) -> list[tuple[str, JobState]]:
        """Give the jobs of servers that are gone back to the queue; return their ids and new states.

        `running` ones here, whose leases are late, stay; of others of this server the claim's answer was lost.
        """
        expired = sa.and_(_jobs.c.state == _RUNNING, _jobs.c.lease < time.time(), _jobs.c.volume == self.volume)
        states = []
        with self._begin() as connection:
            query = sa.select(_jobs.c.id, _jobs.c.owner).where(expired).with_for_update(skip_locked=True)
            for id, owner in connection.execute(query).all():
                ours = owner == self.owner
                if not (ours and id in running):
                    which = sa.and_(_jobs.c.id == id, expired)
                    states.append((id, self._release(connection, which, "its server ended", None, not ours)))
        return [(id, state) for id, state in states if state is not None]

    def expire(self) -> list[str]:
        """Fail the queued jobs whose deadline has passed; return their ids."""
        now = time.time()
        late = sa.and_(_jobs.c.state == _QUEUED, _jobs.c.deadline < now)
        with self._begin() as connection:
            query = sa.select(_jobs.c.id).where(late).limit(_SLICE).with_for_update(skip_locked=True)
            ids = list(connection.execute(query).scalars())
            if ids:
                error = "DeadlineExceeded: the deadline passed while the job was queued"
                connection.execute(
                    _jobs.update()
                    .where(_jobs.c.id.in_(ids), late)
                    .values(state=JobState.FAILED.value, finished=now, error=error, **_ENDED)
                )
        return ids

    def prune(self, retention_s: float, most_result_bytes: int) -> tuple[list[str], list[str]]:
        """Remove jobs that ended longer ago than the retention, and forget results beyond the limit on their bytes.

        Of the jobs that have ended, the newest 100,000 are kept at most. The oldest result of the key that has the most
        bytes goes first. Returns the ids of the jobs that were removed, and of those whose result was, 10,000 of each
        at most: the next call goes on.
        """
        mine = _jobs.c.volume == self.volume
        final = [mine, _jobs.c.state.in_(_FINAL)]
        oldest = sa.select(_jobs.c.id, _jobs.c.finished).where(*final).order_by(_jobs.c.finished).limit(_SLICE)
        stored = (
            sa.select(_jobs.c.id, _jobs.c.key_id, _jobs.c.result_bytes)
            .where(mine, _jobs.c.result_bytes.is_not(None))
            .order_by(_jobs.c.finished)
        )
        with self._begin(alone=True) as connection:
            excess = connection.execute(sa.select(sa.func.count()).where(*final)).scalar_one() - _MOST_ENDED
            until = time.time() - retention_s
            rows = connection.execute(oldest).all()
            removed = [row.id for number, row in enumerate(rows) if number < excess or row.finished < until]
            if removed:
                connection.execute(_jobs.delete().where(_jobs.c.id.in_(removed)))
            results = connection.execute(stored).all()
            gone = _over_limit([(row.id, row.key_id, row.result_bytes) for row in results], most_result_bytes)[:_SLICE]
            if gone:
                message = "the result was removed: stored results reached their limit"
                connection.execute(
                    _jobs.update().where(_jobs.c.id.in_(gone)).values(result_bytes=None, message=message)
                )
        return removed, gone

    def states(self, ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of those of the ids that are jobs."""
        query, left = sa.select(_jobs.c.id, _jobs.c.state), list(ids)
        states: dict[str, JobState] = {}
        with self._begin(reads=True) as connection:
            for first in range(0, len(left), _SLICE):
                rows = connection.execute(query.where(_jobs.c.id.in_(left[first : first + _SLICE])))
                states |= {row.id: JobState(row.state) for row in rows}
        return states


def check_bounds(
    total: Sequence[int], own: Sequence[int], added_bytes: int, most_jobs: int, most_bytes: int, retry_after_s: float
) -> None:
    """Raise QueueFull if one more request of `added_bytes` passes a bound of the queue.

    One key may hold three quarters of each bound, also where it is the only one, so that there is room for others; of
    the bytes more if it is one request. `total` and `own`, the key's, are the number of requests and their bytes.
    """
    for (count, size), whose, jobs, most in (
        (total, "", most_jobs, most_bytes),
        (own, " of this key", math.ceil(most_jobs * 3 / 4), most_bytes * 3 // 4),
    ):
        if count >= jobs:
            raise QueueFull(f"the queue holds {count} requests{whose}, as many as it may", retry_after_s)
        if size + added_bytes > most and (count or not whose):
            held = f"the queue holds {size:,} bytes{whose} and may hold {most:,}; the request has {added_bytes:,}"
            raise QueueFull(held, retry_after_s)


def _storable(text: str) -> str:
    """Return a text without what PostgreSQL refuses, NUL and lone surrogates, which errors repeat from requests."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _over_limit(results: list[tuple[str, str, int]], most_bytes: int) -> list[str]:
    """Return the ids of results, given the oldest first, to remove so that the others keep the limit."""
    by_key: dict[str, list[tuple[str, int]]] = {}
    for id, key, size in results:
        by_key.setdefault(key, []).append((id, size))
    held = {key: sum(size for _, size in items) for key, items in by_key.items()}
    gone = []
    while sum(held.values()) > most_bytes:
        largest = max(held, key=lambda key: held[key])
        id, size = by_key[largest].pop(0)
        held[largest] -= size
        gone.append(id)
    return gone


def _job(row: Mapping[Any, Any]) -> Job:
    values = {name: row[name] for name in Job.__dataclass_fields__}
    return Job(**{**values, "state": JobState(values["state"])})


def _serialize(engine: sa.Engine) -> None:
    """Make transactions on SQLite that write begin as writers, one at a time, in the write-ahead log.

    One that reads first and then writes would fail if another wrote in between. Those that only read wait for none.
    """

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver begins no transaction of its own
        connection.execute("PRAGMA busy_timeout=30000")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the file to the write-ahead log. SQLite waits for no other writer then, whatever the busy timeout."""
    until = time.monotonic() + 30.0
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return
