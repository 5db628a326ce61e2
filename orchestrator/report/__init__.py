"""Reports of stored runs: facts (content, bench), wording (text, bench_text, table), files (write)."""

from orchestrator.report.write import ReportError, report, write_report

__all__ = ["ReportError", "report", "write_report"]
