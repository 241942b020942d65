"""The Ray shell of elastic-refit: thin actors, no policy. Imported as ``elastic_refit.actors``."""

if __name__ != "elastic_refit.actors":
    raise ImportError("import elastic_refit.actors instead: a top-level package 'actors' would collide with yours")
