# %% [markdown]
# # In a scikit-learn pipeline
#
# `OffmapRegressor`, `OffmapClassifier` and `OffmapDetector` train small nets on a table and guard them. They are ordinary
# estimators: in pipelines, in grid searches, in pickles.

# %%
import os

import numpy as np
from sklearn.datasets import load_wine
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer

from offmap.integrations.sklearn import OffmapClassifier, OffmapDetector

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
steps = 100 if SMOKE else None

# %% [markdown]
# Wines of three growers. The classifier learns from two of them, and is then tested on wines of the third.

# %%
X, y = load_wine(return_X_y=True)
first_two = y < 2
X_train, X_test, y_train, y_test = train_test_split(X[first_two], y[first_two], test_size=0.3, random_state=0)
others = X[~first_two]

pipeline = make_pipeline(
    QuantileTransformer(n_quantiles=30, output_distribution="normal", random_state=0),
    OffmapClassifier(random_state=0, steps=steps),
)
search = GridSearchCV(pipeline, {"offmapclassifier__hidden": [(16,), (32, 32)]}, cv=2)
search.fit(X_train, y_train)
print(f"best: {search.best_params_['offmapclassifier__hidden']}, test accuracy {search.score(X_test, y_test):.0%}")

# %% [markdown]
# A pipeline passes `return_ood=True` on to its last step, which holds the guard.

# %%
for name, rows in {"growers 1 and 2": X_test, "grower 3": others}.items():
    _, ood = search.best_estimator_.predict(rows, return_ood=True)
    print(f"{name}: {ood.mean():.0%} of {len(rows)} off the map")

# %% [markdown]
# Without targets, `OffmapDetector` is an outlier detector with scikit-learn's sign: `score_samples` is higher for
# in-distribution rows, and `predict` is 1 for them and −1 for outliers.

# %%
detector = OffmapDetector(random_state=0, steps=steps).fit(X_train)
print("outliers among grower 3:", f"{np.mean(detector.predict(others) == -1):.0%}")
