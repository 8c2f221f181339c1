"""Models that a person added by folder, file or hub id, so that every page offers them."""

from datetime import UTC, datetime

from sqlalchemy import Column, Float, MetaData, String, Table, delete, insert, select
from sqlalchemy.exc import IntegrityError

from app.runs import tables
from app.runs.store import Store

# A table of its own: whoever opens the database without the pages does not need it.
_metadata = MetaData()
_models = Table(
    "models",
    _metadata,
    Column("reference", String(1024), primary_key=True),
    Column("added_at", Float, nullable=False),
)


def added_models(store: Store) -> list[str]:
    """References (folder, GGUF file, hub id with or without revision) in the order they were added."""
    _make_table(store)
    with store.engine.connect() as connection:
        query = select(_models.c.reference).order_by(_models.c.added_at)
        return list(connection.execute(query).scalars())


def add_model(store: Store, reference: str) -> bool:
    """Remember a model; False when it is there already."""
    _make_table(store)
    try:
        with store.writer.begin() as connection:
            connection.execute(insert(_models).values(reference=reference, added_at=datetime.now(UTC).timestamp()))
            tables.bump(connection, "changes")
    except IntegrityError:
        return False
    return True


def forget_model(store: Store, reference: str) -> None:
    """Take a model off the list; its files and its runs stay where they are."""
    _make_table(store)
    with store.writer.begin() as connection:
        connection.execute(delete(_models).where(_models.c.reference == reference))
        tables.bump(connection, "changes")


def _make_table(store: Store) -> None:
    _metadata.create_all(store.engine)
