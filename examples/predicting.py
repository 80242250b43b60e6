"""Predict in Python: names, probabilities, "none of these", sets of classes, and batches."""

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_clip
from dulbe_peft.arguments import Query
from dulbe_peft.photos.deployment.batches import Featurizer, Predictor
from dulbe_peft.streams.digits import digit_tasks

clip, processor = load_clip("demo")
args = LearnerArguments(prompt_template="a photo of the digit {}.")
names = ("lda", "bridge")
learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers=names)
tasks = digit_tasks()
learner.learn_task(tasks[0].train)
learner.learn_task(tasks[1].train)

image = tasks[1].test[0]["image"]
print(learner.predict(image))  # two
print(learner.predict([image, image], top_k=2, return_scores=True))
answers, novelties = learner.predict([image, image], return_novelty=True)
print(learner.predict(image, reject=0.05))  # None if it shows none of the classes
print(learner.predict(image, coverage=0.9))  # all classes that it may show

image.save("photo.png")
for row in learner.predictions(["photo.png"], Query(top_k=2, reject=0.05)):  # skips what cannot be read
    print(row.image, row.classes, row.probabilities, row.known, row.error)

features = learner.image_embeds(tasks[1].test)
probabilities = learner.classifiers["bridge"].probabilities(features)
print(probabilities.shape, learner.class_names)

learner.save_pretrained("digits")
predictor = Predictor("digits", machine={"device": "cpu"})
print(predictor({"image": ["photo.png"]}))
embedding = Featurizer("digits")({"image": [image, "photo.png"]})["embedding"]  # (2, d), float32
