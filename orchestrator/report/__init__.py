"""Reports of stored runs: facts (content, bench, evidence), tables, charts, files (write, template)."""
