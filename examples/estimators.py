"""Estimators of scikit-learn: classifiers on features, and one on photographs."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score

from dulbe_peft.data.digits import DIGITS
from dulbe_peft.sklearn import FeatureClassifier, ImageClassifier

data = load_digits()  # or your own features
features, labels = data.data, data.target
print(cross_val_score(FeatureClassifier(), features, labels, cv=3).mean())

month = labels < 6
classifier = FeatureClassifier().partial_fit(features[month], labels[month])
classifier.partial_fit(features[~month], labels[~month])  # adds four classes to the six
print(classifier.classes_, classifier.predict_proba(features[:2]).round(2))

photos, names = (data.images[:200] * 15.9).astype(np.uint8), np.array(DIGITS)[labels[:200]]
model = ImageClassifier("demo", prompt_template="a photo of the digit {}.").fit(photos, names)
print(model.predict(photos[:2]), model.score(photos, names))
search = GridSearchCV(model, {"classifier": ["bayes", "lda"]}, cv=2).fit(photos, names)
print(search.best_params_)
