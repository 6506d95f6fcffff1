"""Revisions of the job store's schema, by Alembic; JobStore.upgrade runs them when a server starts.

Two versions of the service work on one store during an upgrade. So a revision only adds: tables, indices, and columns
that are nullable or have a server default. A revision that an older service cannot work with sets
accelerant_schema.oldest_revision to its own number, and older services then refuse to start.
"""
