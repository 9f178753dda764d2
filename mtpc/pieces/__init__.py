"""The glue of a step, piece by piece: what is traced at each bucket's own shapes; see `step`."""
