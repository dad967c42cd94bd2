"""The formats in which models write tool calls: one module per family of formats, with its parser."""
