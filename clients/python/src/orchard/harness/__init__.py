"""Sandboxes for the field's harnesses: one module for each, an extra of the distribution each.

| harness | module | extra |
|---|---|---|
| mini-swe-agent | `orchard.harness.mini_swe_agent` | `mini-swe-agent` |
| Inspect AI | `orchard.harness.inspect_ai` | `inspect-ai` |
| Harbor | `orchard.harness.harbor` | `harbor` |
| SWE-ReX | `orchard.harness.swe_rex` | `swe-rex` |

A module imports its harness; nothing else of this package does. What a command does is a result in the harness's own
form. What the platform fails to do is an exception, never a result that could be scored.
"""
