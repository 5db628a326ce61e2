"""Reports of stored runs: facts (content, bench), wording (text, bench_text, table), charts, files (write)."""
