"""What a run says of itself: metrics, tables, the live console and the report page."""
