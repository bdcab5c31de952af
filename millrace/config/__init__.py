"""Settings of a run (`settings`) and how recipes become them (`recipe`)."""
