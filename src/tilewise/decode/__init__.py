"""What decoding needs beside attention itself: rotary embedding, appending to a cache, plans of split-KV work."""
