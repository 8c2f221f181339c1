"""The tables of the database, how it is opened, and the version of its layout."""

import sqlite3
import uuid
from typing import Any

from filelock import FileLock
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.schema import CreateColumn

from app.paths import home, locks
from pruning.errors import InputError

LAYOUT = 3
BUSY_SECONDS = 20

metadata = MetaData()

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Integer, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("key", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String(32), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("label", String(255), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("spec", Text, nullable=False),
    Column("home", String(36), nullable=False),
    Column("device", String(32), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("phase", String(64)),
    Column("done", BigInteger, nullable=False, default=0),
    Column("total", BigInteger, nullable=False, default=0),
    Column("unit", String(32), nullable=False, default=""),
    Column("step", Integer, nullable=False, default=0),
    Column("steps", Integer, nullable=False, default=0),
    Column("remaining_s", Float),
    Column("error", Text),
    Column("artifact", String(255)),
    Column("artifact_bytes", BigInteger),
    Column("collapsed", Boolean, nullable=False, default=False),
    Column("worker_host", String(255)),
    Column("worker_pid", Integer),
    Column("worker_started", Float),
    Column("heartbeat", Float),
    UniqueConstraint("run_id", "attempt"),
)

# What pages sort, filter and compare by, flat, so that no JSON is parsed to draw a thousand runs.
results = Table(
    "results",
    metadata,
    Column("run_key", ForeignKey("runs.key"), primary_key=True),
    Column("model", String(255), nullable=False),
    Column("method", String(64), nullable=False),
    Column("sparsity_asked", Float, nullable=False),
    Column("pattern", String(16), nullable=False),
    Column("quantize", String(64), nullable=False),
    Column("dtype", String(32), nullable=False),
    Column("device", String(255), nullable=False),
    Column("evaluation", String(255), nullable=False),
    Column("calibration", String(255), nullable=False),
    Column("protocol", String(32), nullable=False),
    Column("machine", String(255), nullable=False),
    Column("runtime", String(255), nullable=False),
    Column("dense16_bytes", BigInteger),
    Column("dense16_pruned_layer_bytes", BigInteger),
    Column("source_bytes", BigInteger),
    Column("source_name", String(255)),
    Column("parameters", BigInteger),
    Column("versions", String(1024), nullable=False),
    # From layout 2 on; what there was before was all made this way.
    Column("allocation", String(32), nullable=False, server_default="uniform"),
    Column("statistics", String(32), nullable=False, server_default="sequential"),
    Column("made_together", Integer),
    Column("common_seconds", Float),
    # From layout 3 on; before there were no groups.
    Column("quantize_group", Integer),
)

figures = Table(
    "figures",
    metadata,
    Column("run_key", ForeignKey("runs.key"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", Float),
    Column("unit", String(32), nullable=False),
    Column("low", Float),
    Column("high", Float),
    Column("p50", Float),
    Column("p95", Float),
)

# The whole record, samples included, as JSON: read one at a time.
records = Table(
    "records",
    metadata,
    Column("run_key", ForeignKey("runs.key"), primary_key=True),
    Column("record", Text, nullable=False),
)

# How long each phase of a finished run took, to say how long the next one will.
phases = Table(
    "phases",
    metadata,
    Column("run_key", ForeignKey("runs.key"), primary_key=True),
    Column("phase", String(64), primary_key=True),
    Column("work", String(255), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("total", BigInteger, nullable=False),
    Index("phases_by_work", "work"),
)


def open_database(url: str) -> Engine:
    """An engine whose tables exist. Raises InputError when it cannot be opened or was made by a later layout."""
    try:
        sqlite = make_url(url).get_backend_name() == "sqlite"
        engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS} if sqlite else {})
        if sqlite:
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        _make_tables(engine)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"{url!r} is not a database address Poda can use: {error}. Set PODA_DATABASE to a SQLAlchemy URL."
        ) from error
    except DBAPIError as error:
        raise InputError(
            f"The database {make_url(url).render_as_string()} cannot be opened: {error.orig}. "
            "Check that it is a Poda database and can be written to, or set PODA_HOME or PODA_DATABASE to another."
        ) from error
    return engine


def writing(engine: Engine) -> Engine:
    """The same engine, whose transactions take the write lock as they begin.

    SQLite refuses at once, without waiting, to turn a read transaction into a write one that another writer has
    overtaken; beginning with the lock makes it wait instead.
    """
    return engine.execution_options(poda_writes=True)


def bump(connection: Connection, *names: str) -> None:
    """Count up ``names``, so that whoever watches them sees that something changed."""
    connection.execute(update(counters).where(counters.c.name.in_(names)).values(value=counters.c.value + 1))


def machine_token() -> str:
    """An id of this PODA_HOME: runs are made where they were asked for, because their files are there."""
    file = home() / "machine-id"
    with FileLock(locks() / "machine-id.lock"):
        if not file.exists():
            file.write_text(str(uuid.uuid4()))
        return file.read_text().strip()


def _make_tables(engine: Engine) -> None:
    for attempt in (1, 2):
        try:
            with writing(engine).begin() as connection:
                metadata.create_all(connection)
                counted = connection.execute(select(counters.c.name, counters.c.value))
                known = {row.name: row.value for row in counted}
                for name, value in (("layout", LAYOUT), ("changes", 0), ("results", 0)):
                    if name not in known:
                        connection.execute(insert(counters).values(name=name, value=value))
                if known.get("layout", LAYOUT) < LAYOUT:
                    _add_missing_columns(connection)
                    connection.execute(update(counters).where(counters.c.name == "layout").values(value=LAYOUT))
            break
        except DBAPIError:
            # Another process may be making the same tables; what it made is there the second time.
            if attempt == 2:
                raise
    if known.get("layout", LAYOUT) > LAYOUT:
        raise InputError(
            f"The database was made by a newer Poda (layout {known['layout']}, this one knows {LAYOUT}): "
            "update Poda, or set PODA_HOME to another folder."
        )


def _add_missing_columns(connection: Connection) -> None:
    """Bring the table of an older layout up to this one: each column that came later has a default or may be empty."""
    there = {column["name"] for column in inspect(connection).get_columns(results.name)}
    for column in results.columns:
        if column.name not in there:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {results.name} ADD COLUMN {definition}")


def _set_up_sqlite(connection: Any, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.isolation_level = None  # the driver would begin transactions by itself, and too late
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("poda_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
