"""The first schema: jobs, the keys' turns, and the oldest revision that a service must know."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "accelerant_jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("operation", sa.String(100), nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("progress", sa.Double, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("key_id", sa.String(100), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("request_id", sa.String(100)),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("started", sa.Double),
        sa.Column("finished", sa.Double),
        sa.Column("deadline", sa.Double),
        sa.Column("input_bytes", sa.BigInteger, nullable=False),
        sa.Column("result_bytes", sa.BigInteger),
        sa.Column("volume", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("mark", sa.Double, nullable=False),
        sa.Column("device", sa.String(100)),
        sa.Column("avoid", sa.String(200)),
        sa.Column("owner", sa.String(32)),
        sa.Column("lease", sa.Double),
        sa.Column("cancel", sa.Boolean, nullable=False),
    )
    op.create_index("accelerant_jobs_by_state", "accelerant_jobs", ["state", "created"])
    op.create_index("accelerant_jobs_by_key", "accelerant_jobs", ["key_id", "created"])
    op.create_table(
        "accelerant_turns",
        sa.Column("key_id", sa.String(100), primary_key=True),
        sa.Column("claimed", sa.Double, nullable=False),
    )
    schema = op.create_table("accelerant_schema", sa.Column("oldest_revision", sa.Integer, nullable=False))
    op.bulk_insert(schema, [{"oldest_revision": 1}])
