"""Operations of a transformer step: their sizes, FLOPs and bytes. Their speed is the subject of pricing."""
