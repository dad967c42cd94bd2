"""fggen: prompt files in, completions out."""
