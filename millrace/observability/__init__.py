"""Observability of a run: metrics, tables, the live console and the report page."""
