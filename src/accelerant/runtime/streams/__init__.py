"""Work in order: streams, events, copies, chunked streaming, captured CUDA graphs."""
