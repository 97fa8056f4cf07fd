"""Op set "triton-router": the router in Triton."""
