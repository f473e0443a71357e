"""Category-agnostic pose estimation: keypoints of any category, from one picture with its keypoints."""
