"""Reports of stored runs: facts (bench, evidence), tables, charts, files (write, template)."""
