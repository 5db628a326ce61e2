"""Reports of stored runs: what they say (content, bench), in words (text, bench_text, table), as files (write)."""

from orchestrator.report.write import ReportError, report, write_report

__all__ = ["ReportError", "report", "write_report"]
