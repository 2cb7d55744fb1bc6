"""Step composition: from priced operations to a step time with overlap, pipeline stages, bubble and interval."""
