"""Recurrent layers of hybrid models (Qwen3.5), with the same bits in prefills and decodes; see docs/hybrids.md."""
