"""The paper's comparisons as software: a study file becomes runs, their results tables, figures and a page."""
