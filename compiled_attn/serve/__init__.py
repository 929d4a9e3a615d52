"""An OpenAI-compatible server over one engine (extra ``serve``)."""
