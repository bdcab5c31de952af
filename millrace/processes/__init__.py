"""Child processes: started under a keeper, asked by id, supervised."""
